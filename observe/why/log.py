"""Reads what a run's log says of one moment: the state then, and what each role said last.

It decides up to where the log is read: rounds and statuses that lie behind the moment are left out.
What a status says is a claim of its role; what the state says was decided, and is certain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from dora_pipe.audit.reading import record_at
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.catalogue.account import Event, RunAccount
from dora_pipe.catalogue.fallbacks import FallbackAccount
from dora_pipe.catalogue.statuses import LastStatus, Statuses, read_statuses
from dora_pipe.core.errors import SchemaError
from dora_pipe.observe.alarms import Pauses
from dora_pipe.observe.failed import FailedTrajectories, GroupsSinceStep
from dora_pipe.observe.why.fallbacks import KEPT_MAX, FallbackTaken, fallback_taken
from dora_pipe.orchestrator.fold import fold_round
from dora_pipe.orchestrator.recovery import ReadRound, read_rounds
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import Resume, StepCommitted, WorkerReady, decode_control
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import Round, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import TurnProgress
from dora_pipe.schemas.trajectory_codec import decode_any_progress
from dora_pipe.schemas.wire import Unknown

TAIL_RECORDS: Final = 20_000
"""Statuses at the end of the metrics topic that a look at the present reads."""


@dataclass(slots=True, kw_only=True)
class Picture:
    """A moment of a run."""

    at_ns: int = 0
    """The moment, wall clock."""
    state: State = field(default_factory=State)
    """What the orchestrator knew."""
    account: RunAccount = field(default_factory=RunAccount)
    """When things happened, and who has come and gone."""
    since_step: GroupsSinceStep = field(default_factory=GroupsSinceStep)
    pauses: Pauses = field(default_factory=Pauses)
    failed: FailedTrajectories = field(default_factory=FailedTrajectories)
    heard: dict[str, LastStatus] = field(default_factory=dict)
    """By role: `orchestrator`, `trainer`, a worker's name."""
    fallbacks: deque[FallbackTaken] = field(default_factory=partial(deque, maxlen=KEPT_MAX))
    """Which files of versions were lost or damaged on their way to a worker; the newest."""
    forms: FallbackAccount = field(default_factory=FallbackAccount)
    """Knows which there were."""
    answered: Callable[[Resume], TurnProgress | None] = lambda _: None
    """The call of an agent that a progress record is of; None for any other record."""

    @property
    def started_ns(self) -> int:
        """`run started`; 0 before it."""
        return 0 if self.account.started is None else self.account.started.at_ns

    def gone(self) -> list[str]:
        """Workers that left or were fenced, and have not come back."""
        return [name for name, one in self.account.named.items() if one.gone is not None]

    def placed_ns(self, trajectory: str) -> int | None:
        """When a request of an open group was placed last."""
        group = self.account.open.get(group_of(trajectory))
        request = None if group is None else group.requests.get(trajectory)
        return None if request is None else request.attempts[-1].placed_ns


def look(bus: Bus, topics: Topics, *, now_ns: int) -> Picture:
    """The run at present, as far as its log goes; `now_ns` is the wall clock.

    Raises InvariantBroken, LogTruncated, SchemaError, BusError for a log that cannot be folded.
    """
    picture = _folded(bus, topics, lambda _: False)
    picture.at_ns = now_ns
    picture.heard = _heard(bus, topics, picture.pauses)
    picture.answered = partial(_answered, bus, topics)
    return picture


def look_back(bus: Bus, topics: Topics, *, at_ns: int) -> Picture:
    """The run at a moment of the past. Raises what `look` raises."""
    picture = _folded(bus, topics, lambda round_: round_.now_ns > at_ns)
    picture.at_ns = at_ns
    picture.heard = _heard(bus, topics, picture.pauses, at_ns)
    picture.answered = partial(_answered, bus, topics)
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
    picture.heard = _heard(bus, topics, picture.pauses, picture.at_ns)
    picture.answered = partial(_answered, bus, topics)
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


def _note(picture: Picture, at: ReadRound) -> None:
    """A round and what it folds, to the catalogue's account."""
    events: list[Event] = []
    for record in at.control:
        with suppress(SchemaError):  # it is among the dead letters, and the fold has counted it
            fact = decode_control(record.value)
            if not isinstance(fact, Unknown):
                events += picture.account.fact(record.offset, fact)
                picture.pauses.fact(fact)
            if isinstance(fact, StepCommitted):
                picture.fallbacks += map(fallback_taken, picture.forms.committed(fact))
            elif isinstance(fact, WorkerReady):
                picture.fallbacks += map(fallback_taken, picture.forms.ready(fact))
    events += picture.account.round(at.round, at.offset)
    for event in events:
        picture.since_step.happened(event)
        picture.failed.happened(event)


def _answered(bus: Bus, topics: Topics, resume: Resume) -> TurnProgress | None:
    record = record_at(bus, TopicPartition(topics.progress, resume.partition), resume.offset)
    if record is None:
        return None
    with suppress(SchemaError):
        found = decode_any_progress(record.value)
        return found if isinstance(found, TurnProgress) else None
    return None


def _heard(
    bus: Bus, topics: Topics, pauses: Pauses, until_ns: int | None = None
) -> dict[str, LastStatus]:
    """What every role had said last at a moment, at present without one."""
    statuses = Statuses()
    for status in read_statuses(bus, topics, tail=TAIL_RECORDS, until_ns=until_ns):
        statuses.receive(pauses.excused(status))
    return statuses.heard
