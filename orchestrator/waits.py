"""Description of what a run waits for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import chain, islice
from typing import Final

from dora_pipe.core.pure.wait_tracker import BLOCKERS_MAX, LimitKind, PendingWait
from dora_pipe.orchestrator import colocated
from dora_pipe.orchestrator.apply_decision import part_size
from dora_pipe.orchestrator.entities import Group
from dora_pipe.orchestrator.staleness import closed_by, lacking
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.metrics import Blocker

NAMED_MAX: Final = 3
"""Groups named in a sentence."""


def waits(
    state: State, *, since_ns: int | None = None, held_back: Sequence[str] = ()
) -> list[PendingWait]:
    """Return what the run waits for; `since_ns` is the monotonic time of the trainer's last start
    or end.

    `held_back` are topics with unreadable records.
    """
    standing = _standing(state, since_ns)
    blocking = ([] if standing is None else [standing]) + _hostless(state)
    if held_back:
        blocking.append(held_back_by(held_back))
    return blocking


def admission_limit(state: State) -> str:
    """Return the setting that blocks admission; empty if none."""
    idle = state.started is None or state.done or state.paused
    return "" if idle else closed_by(state.deadlines, state.standing())


def held_back_by(topics: Sequence[str]) -> PendingWait:
    """Return the wait for held-back records."""
    return PendingWait(
        name="held-back",
        words=f"records of {', '.join(topics)}, not readable yet: a dead role left an "
        "append open, or a quota delays reading",
        key=",".join(topics),
        blockers=[Blocker("topic", topic) for topic in topics],
    )


def _standing(state: State, since_ns: int | None) -> PendingWait | None:
    if state.started is None:
        return _still("start", "the start of the run", "", "short")
    if state.done:
        return None
    if state.failures.halted:
        words = f"a user to resume the run: {state.failures.halted}"
        return _still("halted", words, "", "free", [Blocker("user", "resume")])
    if state.training is not None:
        step = state.training.step
        words = f"the trainer: step {step}, attempt {state.training.attempt}"
        blockers_ = [Blocker("role", "trainer"), Blocker("step", str(step))]
        return _still("trainer", words, str(step), "work", blockers_, since_ns)
    if not any(worker.usable for worker in state.workers.values()):
        workers = [Blocker("worker", name) for name in sorted(state.workers)]
        return _still("worker", f"a worker{_rejection(state)}", "", "short", workers)
    if asleep_next := colocated.awaited(state) if colocated.step_is_ready(state) else []:
        step = state.version
        words = f"colocated workers to sleep, so that step {step} begins: {', '.join(asleep_next)}"
        blockers_ = [Blocker("worker", name) for name in asleep_next[:BLOCKERS_MAX]]
        more = len(asleep_next) - len(blockers_)
        return _still("colocated", words, str(step), "work", blockers_, more=more)
    groups, count = blocking_groups(state, BLOCKERS_MAX)
    if groups:
        named = [Blocker("group", group.spec.group) for group in groups]
        more = count - len(named)
        words = _names(groups, count)
        words += f", for part {len(state.parts)}" if in_parts(state) else ""
        return _still("groups", words, str(state.version), "work", named, since_ns, more)
    if state.paused:
        return _still("pause", "the end of a pause", "", "free", [Blocker("user", "resume")])
    return _still("admission", "new groups", str(state.version), "work", _loading(state))


def _hostless(state: State) -> list[PendingWait]:
    served = {worker.target for worker in state.workers.values() if worker.usable}
    served.update(
        version
        for name, residence in state.residents.items()
        if state.workers[name].usable
        for version in residence.held
    )
    return [
        PendingWait(
            name="host",
            words=f"a worker for {len(queue)} queued requests of version {version}",
            key=str(version),
            limit="work",
            blockers=[Blocker("version", str(version))],
        )
        for version, queue in sorted(state.queues.items())
        if version not in served
    ]


def _loading(state: State) -> list[Blocker]:
    workers = sorted(state.workers.values(), key=lambda worker: worker.name)
    return [
        Blocker("worker", worker.name) for worker in workers if worker.usable and worker.loading
    ]


def _still(
    name: str,
    words: str,
    key: str,
    limit: LimitKind,
    blockers_: Sequence[Blocker] = (),
    since_ns: int | None = None,
    more: int = 0,
) -> PendingWait:
    return PendingWait(
        name=name,
        words=words,
        key=key,
        limit=limit,
        still=True,
        since_ns=since_ns,
        blockers=blockers_,
        more=more,
    )


def blocking_groups(state: State, most: int) -> tuple[list[Group], int]:
    """Return at most `most` groups that block progress, earliest deadlines first, and their number;
    at the end of the run, open evaluation groups."""
    standing = state.standing()
    if standing.step >= standing.steps:
        groups = state.groups.values()
        first = heapq.nsmallest(most, groups, key=lambda group: group.key)
        return first, len(groups)
    lacks = lacking(
        state.finished,
        state.deadlines,
        step=standing.step,
        per_step=standing.per_step,
        taken=len(state.in_parts),
        size=part_size(state),
    )
    generating = state.index.generating
    due = [
        version for version in sorted(generating) if lacks.until is None or version <= lacks.until
    ]
    names = islice(chain.from_iterable(generating[version] for version in due), most)
    count = sum(len(generating[version]) for version in due)
    return [state.groups[name] for name in names], count


def in_parts(state: State) -> bool:
    """Report whether the next batch has parts."""
    return bool(state.parts or part_size(state))


def _names(groups: Sequence[Group], count: int) -> str:
    names = ", ".join(map(_words, groups[:NAMED_MAX]))
    more = count - NAMED_MAX
    return f"groups {names}" + (f" and {more} more" if more > 0 else "")


def _words(group: Group) -> str:
    count = min(group.spec.samples - group.ended, group.spec.size - group.valid)
    what = "scored together" if group.phase == "scoring" else f"{count} of {group.spec.size} open"
    return f"{group.spec.group} (version {group.spec.version}, {what})"


def _rejection(state: State) -> str:
    return f" (rejected: {state.counters.rejection})" if state.counters.rejection else ""
