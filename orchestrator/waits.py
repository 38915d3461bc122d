"""Says what a run waits for, and whose turn it is; it decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dora_pipe.orchestrator.staleness import waits_until
from dora_pipe.orchestrator.state import Group, State
from dora_pipe.schemas.metrics import Blocker
from dora_pipe.waiting import Found, LimitKind

NAMED_MAX: Final = 3
"""Groups that a sentence names; the others are counted."""


def waits(state: State, *, since_ns: int | None = None) -> list[Found]:
    """What the run waits for, and versions with queued requests that nobody hosts.

    `since_ns` is the monotonic time at which the trainer began or ended its last step, if known.
    """
    standing = _standing(state, since_ns)
    return ([] if standing is None else [standing]) + _hostless(state)


def _standing(state: State, since_ns: int | None) -> Found | None:
    """The one wait that stands between the run and its next step; None when the run is over."""
    if state.facts is None:
        return _still("start", "the start of the run", "", "short")
    if state.done:
        return None
    if state.training is not None:
        step = state.training.step
        words = f"the trainer: step {step}, attempt {state.training.attempt}"
        blockers_ = [Blocker("role", "trainer"), Blocker("step", str(step))]
        return _still("trainer", words, str(step), "work", blockers_, since_ns)
    if not any(worker.usable for worker in state.workers.values()):
        known = [Blocker("worker", name) for name in sorted(state.workers)]
        return _still("worker", f"a worker{_rejection(state)}", "", "short", known)
    found = blockers(state)
    if found:
        named = [Blocker("group", group.spec.group) for group in found]
        return _still("groups", _names(found), str(state.version), "work", named, since_ns)
    if state.paused:
        return _still("pause", "the end of a pause", "", "free", [Blocker("user", "resume")])
    return _still("admission", "new groups", str(state.version), "work", _loading(state))


def _hostless(state: State) -> list[Found]:
    """Versions with queued requests and no worker that has, or gets, them."""
    hosted = {worker.target for worker in state.workers.values() if worker.usable}
    hosted.update(
        version
        for name, one in state.residents.items()
        if state.workers[name].usable
        for version in one.held
    )
    return [
        Found(
            name="host",
            words=f"a worker for {len(queue)} queued requests of version {version}",
            key=str(version),
            limit="work",
            blockers=[Blocker("version", str(version))],
        )
        for version, queue in sorted(state.queues.items())
        if version not in hosted
    ]


def _loading(state: State) -> list[Blocker]:
    """The workers whose weights the run waits for."""
    workers = sorted(state.workers.values(), key=lambda worker: worker.name)
    return [Blocker("worker", one.name) for one in workers if one.usable and one.loading]


def _still(
    name: str,
    words: str,
    key: str,
    limit: LimitKind,
    blockers_: Sequence[Blocker] = (),
    since_ns: int | None = None,
) -> Found:
    return Found(
        name=name,
        words=words,
        key=key,
        limit=limit,
        still=True,
        since_ns=since_ns,
        blockers=blockers_,
    )


def blockers(state: State) -> list[Group]:
    """The unfinished groups that the next step waits for, earliest deadline first.

    At the end of the run: the evaluation groups that are open.
    """
    at = state.standing()
    if at.step >= at.steps:
        return sorted(state.groups.values(), key=lambda group: group.key)
    until = waits_until(state.finished, state.deadlines, step=at.step, per_step=at.per_step)
    found = [
        group
        for group in state.groups.values()
        if group.phase == "generating"
        and group.spec.purpose == "train"
        and (until is None or group.spec.deadline <= until)
    ]
    return sorted(found, key=lambda group: group.key)


def _names(found: Sequence[Group]) -> str:
    names = ", ".join(_words(group) for group in found[:NAMED_MAX])
    more = len(found) - NAMED_MAX
    return f"groups {names}" + (f" and {more} more" if more > 0 else "")


def _words(group: Group) -> str:
    left = group.spec.size - group.ended
    return f"{group.spec.group} (version {group.spec.version}, {left} of {group.spec.size} open)"


def _rejection(state: State) -> str:
    return f" (rejected: {state.tally.rejection})" if state.tally.rejection else ""
