"""Description of what a run waits for."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from dora_pipe.core.pure.wait_tracker import BLOCKERS_MAX, LimitKind, PendingWait
from dora_pipe.orchestrator import colocated
from dora_pipe.orchestrator.apply_decision import part_size
from dora_pipe.orchestrator.staleness import closed_by, lacking
from dora_pipe.orchestrator.state import Group, State
from dora_pipe.schemas.metrics import Blocker

NAMED_MAX: Final = 3
"""Groups named in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """Groups that block progress."""

    first: list[Group]
    """Blocking groups with the earliest deadlines."""
    count: int
    lacks: int = 0
    """Number that suffices."""
    until: int | None = None
    """Step by which they are due; None for any."""


def waits(
    state: State, *, since_ns: int | None = None, held_back: Sequence[str] = ()
) -> list[PendingWait]:
    """Return what the run waits for; `since_ns` is the monotonic time of the trainer's last start
    or end.

    `held_back` are topics with unreadable records.
    """
    standing = _standing(state, since_ns)
    found = ([] if standing is None else [standing]) + _hostless(state)
    if held_back:
        found.append(held_back_by(held_back))
    return found


def admission_limit(state: State) -> str:
    """Return the setting that blocks admission; empty if none."""
    idle = state.facts is None or state.done or state.paused
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
    if state.facts is None:
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
        known = [Blocker("worker", name) for name in sorted(state.workers)]
        return _still("worker", f"a worker{_rejection(state)}", "", "short", known)
    if asleep_next := colocated.awaited(state) if colocated.step_stands(state) else []:
        step = state.version
        words = f"colocated workers to sleep, so that step {step} begins: {', '.join(asleep_next)}"
        blockers_ = [Blocker("worker", name) for name in asleep_next[:BLOCKERS_MAX]]
        more = len(asleep_next) - len(blockers_)
        return _still("colocated", words, str(step), "work", blockers_, more=more)
    found = blockers(state, BLOCKERS_MAX)
    if found.count:
        named = [Blocker("group", group.spec.group) for group in found.first]
        more = found.count - len(named)
        words = _names(found) + (f", for part {len(state.parts)}" if in_parts(state) else "")
        return _still("groups", words, str(state.version), "work", named, since_ns, more)
    if state.paused:
        return _still("pause", "the end of a pause", "", "free", [Blocker("user", "resume")])
    return _still("admission", "new groups", str(state.version), "work", _loading(state))


def _hostless(state: State) -> list[PendingWait]:
    served = {worker.target for worker in state.workers.values() if worker.usable}
    served.update(
        version
        for name, one in state.residents.items()
        if state.workers[name].usable
        for version in one.held
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
    return [Blocker("worker", one.name) for one in workers if one.usable and one.loading]


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


def blockers(state: State, most: int) -> Blocking:
    """Return blocking groups, naming `most`; open evaluation groups at the end of the run."""
    at = state.standing()
    if at.step >= at.steps:
        groups = state.groups.values()
        first = heapq.nsmallest(most, groups, key=lambda group: group.key)
        return Blocking(first=first, count=len(groups))
    lacks = lacking(
        state.finished,
        state.deadlines,
        step=at.step,
        per_step=at.per_step,
        taken=len(state.in_parts),
        size=part_size(state),
    )
    generating = state.index.generating
    due = [one for one in sorted(generating) if lacks.until is None or one <= lacks.until]
    names = islice(chain.from_iterable(generating[one] for one in due), most)
    return Blocking(
        first=[state.groups[name] for name in names],
        count=sum(len(generating[one]) for one in due),
        lacks=lacks.count,
        until=lacks.until,
    )


def in_parts(state: State) -> bool:
    """Report whether the next batch has parts."""
    return bool(state.parts or part_size(state))


def _names(found: Blocking) -> str:
    names = ", ".join(_words(group) for group in found.first[:NAMED_MAX])
    more = found.count - NAMED_MAX
    return f"groups {names}" + (f" and {more} more" if more > 0 else "")


def _words(group: Group) -> str:
    left = min(group.spec.samples - group.ended, group.spec.size - group.valid)
    what = "scored together" if group.phase == "scoring" else f"{left} of {group.spec.size} open"
    return f"{group.spec.group} (version {group.spec.version}, {what})"


def _rejection(state: State) -> str:
    return f" (rejected: {state.counters.rejection})" if state.counters.rejection else ""
