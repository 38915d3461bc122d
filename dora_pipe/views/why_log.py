"""Reads what a run's log says of one moment: the state then, and what each role said last.

It decides up to where the log is read: rounds and statuses that lie behind the moment are left out.
What a status says is a claim of its role; what the state says was decided, and is certain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.history.reading import ends_of, records_of
from dora_pipe.orchestrator.fold import fold_round
from dora_pipe.orchestrator.recovery import ReadRound, read_rounds
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import RunStarted, WorkerJoined, WorkerLeft, decode_control
from dora_pipe.schemas.metrics import (
    AnyMetrics,
    OrchestratorStatus,
    TrainerStatus,
    WorkerStatus,
    decode_metrics,
)
from dora_pipe.schemas.rounds import Dispatch, Fence, Place, Round, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown

ORCHESTRATOR: Final = "orchestrator"
TRAINER: Final = "trainer"

TAIL_RECORDS: Final = 20_000
"""Statuses at the end of the metrics topic that a look at the present reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """What a role said last, and the status before that."""

    status: AnyMetrics
    before: AnyMetrics | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """A worker that left or was fenced, and has not come back."""

    at_ns: int
    why: str


@dataclass(slots=True, kw_only=True)
class Picture:
    """A moment of a run."""

    at_ns: int = 0
    """The moment, wall clock."""
    started_ns: int = 0
    state: State = field(default_factory=State)
    heard: dict[str, Heard] = field(default_factory=dict)
    """By role: `orchestrator`, `trainer`, a worker's name."""
    gone: dict[str, Gone] = field(default_factory=dict)
    joined_ns: dict[str, int] = field(default_factory=dict)
    dispatched_ns: dict[str, int] = field(default_factory=dict)
    """By group; open groups only."""
    placed_ns: dict[str, int] = field(default_factory=dict)
    """By trajectory; requests of open groups only."""
    last_round_ns: int = 0


def look(bus: Bus, topics: Topics, *, now_ns: int) -> Picture:
    """The run at present, as far as its log goes; `now_ns` is the wall clock.

    Raises InvariantBroken, LogTruncated, SchemaError, BusError for a log that cannot be folded.
    """
    picture = _folded(bus, topics, lambda _: False)
    picture.at_ns = now_ns
    _hear(picture, statuses(bus, topics, tail=TAIL_RECORDS))
    return picture


def look_back(bus: Bus, topics: Topics, *, at_ns: int) -> Picture:
    """The run at a moment of the past. Raises what `look` raises."""
    picture = _folded(bus, topics, lambda round_: round_.now_ns > at_ns)
    picture.at_ns = at_ns
    _hear(picture, statuses(bus, topics, tail=TAIL_RECORDS, until_ns=at_ns))
    return picture


def look_before(bus: Bus, topics: Topics, *, step: int) -> Picture | None:
    """The run when the batch of a step was about to be taken; None if it was not taken yet."""
    taken_ns: list[int] = []

    def stops(round_: Round) -> bool:
        for one in round_.decisions:
            if isinstance(one, TakeBatch) and one.step == step:
                taken_ns.append(round_.now_ns)
        return bool(taken_ns)

    picture = _folded(bus, topics, stops)
    if not taken_ns:
        return None
    picture.at_ns = taken_ns[0]
    _hear(picture, statuses(bus, topics, tail=TAIL_RECORDS, until_ns=picture.at_ns))
    return picture


def _folded(bus: Bus, topics: Topics, stops: Callable[[Round], bool]) -> Picture:
    """The rounds before the first one at which `stops` says so."""
    picture = Picture()
    for at in read_rounds(bus, topics):
        if stops(at.round):
            break
        fold_round(picture.state, at.round, at.folded())
        _note(picture, at)
    return picture


def role_of(status: AnyMetrics) -> str:
    """The role that a status is of."""
    match status:
        case WorkerStatus():
            return status.worker
        case TrainerStatus():
            return TRAINER
        case OrchestratorStatus():
            return ORCHESTRATOR


def epoch_of(status: AnyMetrics) -> int:
    """The role epoch that a status is of."""
    return status.epoch if isinstance(status, WorkerStatus) else status.role_epoch


def _note(picture: Picture, at: ReadRound) -> None:
    """What a round says beside the state: when things happened."""
    picture.last_round_ns = at.round.now_ns
    for record in at.control:
        _note_fact(picture, record.value)
    for decision in at.round.decisions:
        if isinstance(decision, Dispatch):
            picture.dispatched_ns[decision.spec.group] = at.round.now_ns
        elif isinstance(decision, Place):
            for request in decision.requests():
                picture.placed_ns[request.trajectory] = at.round.now_ns
        elif isinstance(decision, Fence):
            picture.gone[decision.worker] = Gone(at_ns=at.round.now_ns, why=decision.reason)
    if len(picture.placed_ns) > 2 * len(picture.state.requests) + TAIL_RECORDS:
        _forget_ended(picture)


def _note_fact(picture: Picture, value: bytes) -> None:
    try:
        fact = decode_control(value)
    except SchemaError:
        return  # it is among the dead letters, and the fold has counted it
    match fact:
        case RunStarted():
            picture.started_ns = fact.at_ns
        case WorkerJoined():
            picture.gone.pop(fact.worker, None)
            picture.joined_ns[fact.worker] = fact.at_ns
        case WorkerLeft():
            picture.gone[fact.worker] = Gone(at_ns=fact.at_ns, why=fact.reason)
        case _:
            pass


def _forget_ended(picture: Picture) -> None:
    state = picture.state
    picture.placed_ns = {
        name: ns for name, ns in picture.placed_ns.items() if name in state.requests
    }
    picture.dispatched_ns = {
        name: ns for name, ns in picture.dispatched_ns.items() if name in state.groups
    }


def _hear(picture: Picture, found: list[AnyMetrics]) -> None:
    """Keep the newest two statuses of every role; lower epochs are of the dead."""
    for status in found:
        name = role_of(status)
        known = picture.heard.get(name)
        if known is None or epoch_of(known.status) < epoch_of(status):
            picture.heard[name] = Heard(status=status, before=None)
        elif epoch_of(known.status) == epoch_of(status):
            picture.heard[name] = Heard(status=status, before=known.status)


def statuses(
    bus: Bus, topics: Topics, *, tail: int | None = None, until_ns: int | None = None
) -> list[AnyMetrics]:
    """Statuses up to a moment, in order per partition.

    With `tail`, only that many at the end of each partition, and more of them as long as none is
    old enough for the moment.
    """
    ends = ends_of(bus, topics.metrics)
    while True:
        found: list[AnyMetrics] = []
        whole = True
        for at, end in ends.items():
            start = 0 if tail is None else max(0, end - tail)
            whole = whole and start == 0
            found += _read(bus, at, start, end, until_ns)
        if found or whole or tail is None:
            return found
        tail *= 4


def _read(
    bus: Bus, at: TopicPartition, start: int, end: int, until_ns: int | None
) -> list[AnyMetrics]:
    found = []
    for record in records_of(bus, {at: end}, start=start):
        try:
            status = decode_metrics(record.value)
        except SchemaError:
            continue  # lossy by design; audit looks at dead letters
        if not isinstance(status, Unknown) and (until_ns is None or status.at_ns <= until_ns):
            found.append(status)
    return found
