"""Accounts for every second that the trainer waited for a batch, from rounds and facts alone.

It decides whom a wait is put down to: the trajectory that came last of the batch. Its way is cut
where it changed hands, and each piece of the wait goes to who had it then:

    commit before ... dispatched   `admission`: no group could be admitted, or no slot was free
    dispatched ...... placed       `queue`: no slot was free on a worker of its version
    placed .......... logged       `sampling`, or `lost` for an attempt that ended without a result
    logged .......... taken        `decision`
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.history.reading import records_of
from dora_pipe.orchestrator.recovery import read_rounds
from dora_pipe.schemas.control import (
    RoleStarted,
    RunStarted,
    StepCommitted,
    TrajectoriesLogged,
    decode_control,
)
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import Dispatch, End, Place, Round, StopRun, TakeBatch
from dora_pipe.schemas.topics import Topics

Kind = Literal["admission", "queue", "lost", "sampling", "decision"]


TAIL: Final = 64
"""Offsets at the end of a topic among which its last record lies: offsets are not dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a wait, and who had the trajectory that it waited for."""

    kind: Kind
    seconds: float
    version: int = -1
    worker: str = ""

    def words(self) -> str:
        """As it stands in a sentence after "waited 3 s for"."""
        return piece_words(self.kind, self.worker, (self.version,))


def piece_words(kind: Kind, worker: str, versions: Collection[int]) -> str:
    """Pieces of one kind and worker in words, whichever versions they are of."""
    first, last = min(versions), max(versions)
    of = f"of version {first}" if first == last else f"of versions {first} to {last}"
    match kind:
        case "admission":
            return f"groups {of} to be admitted"
        case "queue":
            return f"a slot {of}"
        case "lost":
            return f"an attempt {of} that was lost on {worker}"
        case "sampling":
            return f"groups {of} on {worker}"
        case "decision":
            return "the orchestrator's decision"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWait:
    """What lay between two steps. Times are wall clock ns."""

    step: int
    free_ns: int
    """The trainer was free: the commit before, or its own start."""
    taken_ns: int
    committed_ns: int | None = None
    """None while it is trained, or when it never was."""
    last: str = ""
    """The trajectory that came last of the batch."""
    version: int = -1
    worker: str = ""
    """Who logged it."""
    logged_ns: int = 0
    pieces: tuple[Piece, ...] = ()

    @property
    def waited_s(self) -> float:
        """From when the trainer was free until its batch was there."""
        return max(0, self.taken_ns - self.free_ns) / 1e9

    def text(self) -> str:
        """As one line."""
        if not self.waited_s:
            return f"step {self.step}: its batch was there before the trainer was free"
        line = f"step {self.step}: the trainer waited {self.waited_s:.2f} s for its batch"
        if self.last:
            line += f"; last came {self.last} (version {self.version}) from {self.worker}"
        pieces = [f"{one.seconds:.2f} s for {one.words()}" for one in self.pieces]
        return line + (f": {', '.join(pieces)}" if pieces else "")


@dataclass(slots=True, kw_only=True)
class Steps:
    """All steps of a run, and its first and last moment."""

    started_ns: int = 0
    ended_ns: int = 0
    over: bool = False
    waits: list[StepWait] = field(default_factory=list)


@dataclass(slots=True)
class _Group:
    """An open group so far."""

    dispatched_ns: int
    version: int
    ways: dict[str, _Way] = field(default_factory=dict)


@dataclass(slots=True)
class _Way:
    """A trajectory's way so far."""

    placed: list[tuple[int, str]] = field(default_factory=list)
    """(round time, worker) of every placement."""
    logged_ns: int = 0
    worker: str = ""


def steps_of(bus: Bus, topics: Topics) -> Steps:
    """Read a run from end to end. Memory is bounded by what is in flight. Raises BusError."""
    reading = _Reading()
    for at in read_rounds(bus, topics):
        for record in at.control:
            reading.take_fact(record.value)
        reading.take_round(at.round)
    return reading.steps


def is_over(bus: Bus, topics: Topics) -> bool:
    """Whether the run's last round stops it. Raises BusError."""
    at = TopicPartition(topics.decisions, 0)
    end = bus.end(at)
    last = [record.value for record in records_of(bus, {at: end}, start=max(0, end - TAIL))]
    return bool(last) and b'"kind":"stop-run"' in last[-1]


class _Reading:
    def __init__(self) -> None:
        self.steps = Steps()
        self._free_ns = 0
        self._groups: dict[str, _Group] = {}

    def take_fact(self, value: bytes) -> None:
        try:
            fact = decode_control(value)
        except SchemaError:
            return  # it is among the dead letters
        match fact:
            case RunStarted():
                self.steps.started_ns = fact.at_ns
            case RoleStarted(role="trainer"):
                self._free_ns = max(self._free_ns, fact.at_ns)
            case TrajectoriesLogged():
                for one in fact.trajectories:
                    self._logged(one.trajectory, fact)
            case StepCommitted():
                self._committed(fact)
            case _:
                pass

    def take_round(self, round_: Round) -> None:
        self.steps.ended_ns = round_.now_ns
        for decision in round_.decisions:
            match decision:
                case Dispatch(spec=spec):
                    self._groups[spec.group] = _Group(round_.now_ns, spec.version)
                case Place(spec=spec) if spec.group in self._groups:
                    ways = self._groups[spec.group].ways
                    for one in decision.requests():
                        way = ways.setdefault(one.trajectory, _Way())
                        way.placed.append((round_.now_ns, decision.worker))
                case TakeBatch():
                    self._taken(decision, round_.now_ns)
                case End():
                    self._groups.pop(decision.group, None)
                case StopRun():
                    self.steps.over = True
                case _:
                    pass

    def _logged(self, trajectory: str, fact: TrajectoriesLogged) -> None:
        group = self._groups.get(group_of(trajectory))
        if group is not None and trajectory in group.ways:
            way = group.ways[trajectory]
            way.logged_ns, way.worker = fact.at_ns, fact.worker

    def _taken(self, decision: TakeBatch, now_ns: int) -> None:
        waits = self.steps.waits
        if waits and waits[-1].step == decision.step:
            return  # another attempt; the wait was the first one's
        # A trainer that is not there yet waits for nothing.
        wait = StepWait(step=decision.step, free_ns=self._free_ns or now_ns, taken_ns=now_ns)
        came = [
            (way.logged_ns, name)
            for taken in decision.groups
            for name, way in self._groups[taken.group].ways.items()
            if way.logged_ns
        ]
        if came:
            last = max(came)[1]
            group = self._groups[group_of(last)]
            wait = replace(
                wait,
                last=last,
                version=group.version,
                worker=group.ways[last].worker,
                logged_ns=group.ways[last].logged_ns,
                pieces=tuple(_pieces(group, group.ways[last], wait)),
            )
        waits.append(wait)

    def _committed(self, fact: StepCommitted) -> None:
        self._free_ns = fact.at_ns
        waits = self.steps.waits
        if waits and waits[-1].step == fact.step:
            waits[-1] = replace(waits[-1], committed_ns=fact.at_ns)
        for group in fact.groups:
            self._groups.pop(group.group, None)


def _pieces(group: _Group, way: _Way, wait: StepWait) -> Iterator[Piece]:
    """The wait, cut where the trajectory that came last changed hands."""
    marks: list[tuple[int, Kind, str]] = [(group.dispatched_ns, "admission", "")]
    kind: Kind = "queue"
    held = ""
    for placed_ns, worker in way.placed:
        marks.append((placed_ns, kind, held))
        kind, held = "lost", worker
    marks += [(way.logged_ns, "sampling", way.worker), (wait.taken_ns, "decision", "")]
    from_ns = wait.free_ns
    for until_ns, kind, worker in marks:
        ends_ns = min(until_ns, wait.taken_ns)
        if ends_ns > from_ns:
            seconds = (ends_ns - from_ns) / 1e9
            yield Piece(kind=kind, seconds=seconds, version=group.version, worker=worker)
            from_ns = ends_ns
