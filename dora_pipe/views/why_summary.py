"""Adds up who waited how long for what, over a whole run; it decides nothing.

The trainer's waits come from rounds and facts, to the turn. Those of the orchestrator and of the
workers come from their statuses: exact where a wait was still there at a status, to half a
heartbeat where it ended between two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.port import Bus
from dora_pipe.schemas.metrics import AnyMetrics, Wait
from dora_pipe.schemas.topics import Topics
from dora_pipe.views.why_chain import counted, span
from dora_pipe.views.why_log import TRAINER, epoch_of, role_of, statuses
from dora_pipe.views.why_steps import Kind, Piece, Steps, StepWait, piece_words, steps_of
from dora_pipe.waiting import alarm_line

TOP_MAX: Final = 4
"""Waits of a role, and steps, that the summary names."""

SILENT_HEARTBEATS: Final = 6.0
"""Statuses that are so many times further apart than usual have a silence between them."""

WORDS: Final[Mapping[str, str]] = {
    "trainer": "the trainer",
    "groups": "groups to finish",
    "worker": "a worker",
    "admission": "new groups",
    "pause": "the end of a pause",
    "start": "the start of the run",
    "requests": "requests",
    "version": "a first version",
    "weights": "weights to be loaded",
    "prompt": "prompts",
    "progress": "progress records",
    "slot": "slots",
    "tokens": "tokens that did not come",
    "environment": "environments",
    "reward": "rewards",
    "codec": "the codec",
    "append": "the trajectories topic",
    "leaving": "its last progress records",
    "replay": "the replay of committed steps",
    "decisions": "the decisions before its start",
    "trajectories": "its batch to be read",
    "commit": "the acknowledgement of a commit",
    "refusal": "the acknowledgement of a refusal",
}
"""What a wait is for, whatever its step or version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWaits:
    """What one role waited for, all its incarnations together. Seconds."""

    role: str
    there_s: float
    waited_s: float
    silent_s: float
    waits: tuple[tuple[str, float], ...]
    """(what for, how long), longest first."""

    def text(self) -> str:
        """As one line."""
        share = f" ({self.waited_s / self.there_s:.0%})" if self.there_s else ""
        line = f"{self.role} waited {span(self.waited_s)} of {span(self.there_s)}{share}"
        named = [f"{span(seconds)} for {what}" for what, seconds in self.waits[:TOP_MAX]]
        rest_s = sum(seconds for _, seconds in self.waits[TOP_MAX:])
        if rest_s:
            more = counted(len(self.waits) - TOP_MAX, "other thing")
            named.append(f"{span(rest_s)} for {more}")
        line += ": " + ", ".join(named) if named else ""
        return line + (f"; it was silent for {span(self.silent_s)}" if self.silent_s else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run's waits."""

    run: str
    run_s: float
    over: bool
    steps: int
    roles: tuple[RoleWaits, ...]
    longest: tuple[StepWait, ...]
    """The steps with the longest waits for their batch."""
    alarms: tuple[str, ...]

    def lines(self) -> Iterator[str]:
        """The summary for people."""
        state = "is over" if self.over else "is not over"
        yield f"{self.run} {state}: {counted(self.steps, 'step')} in {span(self.run_s)}"
        yield from self.alarms
        yield ""
        yield from (role.text() for role in self.roles)
        if self.longest:
            yield ""
            yield "the steps that waited longest for their batch:"
            yield from (one.text() for one in self.longest)


def summarise(bus: Bus, topics: Topics) -> Summary:
    """A run's waits, from its whole log. Raises BusError, LogTruncated, SchemaError."""
    steps = steps_of(bus, topics)
    found = statuses(bus, topics)
    roles = _by_role(found)
    trainer = _trainer(steps, roles.pop(TRAINER, []))
    waited = sorted(steps.waits, key=lambda one: (-one.waited_s, one.step))
    return Summary(
        run=topics.run,
        run_s=max(0, steps.ended_ns - steps.started_ns) / 1e9,
        over=steps.over,
        steps=sum(one.committed_ns is not None for one in steps.waits),
        roles=(trainer, *(_role(name, roles[name]) for name in sorted(roles))),
        longest=tuple(one for one in waited[:TOP_MAX] if one.waited_s),
        alarms=tuple(_alarms(found)),
    )


def _by_role(found: Sequence[AnyMetrics]) -> dict[str, list[AnyMetrics]]:
    roles: dict[str, list[AnyMetrics]] = defaultdict(list)
    for status in found:
        roles[role_of(status)].append(status)
    return roles


def _trainer(steps: Steps, found: Sequence[AnyMetrics]) -> RoleWaits:
    """Batches by rounds and facts; what else it waited for by its statuses."""
    pieces: dict[tuple[Kind, str], list[Piece]] = defaultdict(list)
    for wait in steps.waits:
        for piece in wait.pieces:
            pieces[piece.kind, piece.worker].append(piece)
    told = {
        piece_words(kind, worker, {one.version for one in of}): sum(one.seconds for one in of)
        for (kind, worker), of in pieces.items()
    }
    return _role(TRAINER, found, told=told, skip="batch")


def _role(
    name: str,
    found: Sequence[AnyMetrics],
    *,
    told: Mapping[str, float] | None = None,
    skip: str = "",
) -> RoleWaits:
    """What statuses say; `told` is known better, and is what waits called `skip` were for."""
    lasted = defaultdict(float, told or {})
    there_s = silent_s = 0.0
    usual_ns = _usual_ns(found)
    for before, now in _intervals(found):
        length_ns = now.at_ns - before.at_ns
        if length_ns > SILENT_HEARTBEATS * usual_ns:
            silent_s += length_ns / 1e9
            continue
        there_s += length_ns / 1e9
        for wait, seconds in _waited(before, now):
            if wait.name != skip:
                lasted[WORDS.get(wait.name, wait.name)] += seconds
    waits = sorted(lasted.items(), key=lambda item: (-item[1], item[0]))
    return RoleWaits(
        role=name,
        there_s=there_s,
        waited_s=sum(seconds for _, seconds in waits),
        silent_s=silent_s,
        waits=tuple((what, seconds) for what, seconds in waits if seconds),
    )


def _intervals(found: Sequence[AnyMetrics]) -> Iterator[tuple[AnyMetrics, AnyMetrics]]:
    """Statuses of one incarnation that follow each other."""
    last: dict[int, AnyMetrics] = {}
    for status in found:
        before = last.get(epoch_of(status))
        if before is not None and before.at_ns < status.at_ns:
            yield before, status
        last[epoch_of(status)] = status


def _usual_ns(found: Sequence[AnyMetrics]) -> float:
    """How far apart statuses usually are: progress brings some forward, a silence is rare."""
    lengths = sorted(now.at_ns - before.at_ns for before, now in _intervals(found))
    return lengths[len(lengths) * 9 // 10] if lengths else 0.0


def _waited(before: AnyMetrics, now: AnyMetrics) -> Iterator[tuple[Wait, float]]:
    """How long the role stood still between two statuses."""
    length_ns, covered_ns = now.at_ns - before.at_ns, 0
    last, present = _still(before), _still(now)
    if present is not None:
        covered_ns = min(length_ns, max(0, now.at_ns - present.since_ns))
        yield present, covered_ns / 1e9
    ended = present is None or (last is not None and last.since_ns != present.since_ns)
    if last is not None and ended:
        yield last, (length_ns - covered_ns) / 2e9


def _still(status: AnyMetrics) -> Wait | None:
    return status.waits[0] if status.waits and status.waits[0].still else None


def _alarms(found: Sequence[AnyMetrics]) -> list[str]:
    """Every wait that became an alarm, with how long it had lasted when it was said last."""
    last: dict[tuple[str, int, str, int], str] = {}
    for status in found:
        for wait in status.waits:
            if wait.overdue:
                key = (role_of(status), epoch_of(status), wait.name, wait.since_ns)
                lasted_s = (status.at_ns - wait.since_ns) / 1e9
                last[key] = alarm_line(role_of(status), wait, lasted_s)
    return list(last.values())
