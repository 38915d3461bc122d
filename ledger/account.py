"""Outcomes of groups and steps, from control and decisions alone.

`GroupLedger` judges records and attempts, for audit too. A commit counts if its batch is in
training. Memory depends on what is open.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.ledger.evaluations import Evaluating, EvaluationEnded, samples_of
from dora_pipe.ledger.groups import Change, GroupLedger
from dora_pipe.ledger.history import (
    Batch,
    GroupHistory,
    Moment,
    PartComputed,
    PartTaken,
    RecordLogged,
    WorkerGone,
    WorkerHistory,
    batch_of,
    computed,
    last_of,
    note_end,
)
from dora_pipe.ledger.marks import Mark, MarkAccount, Stop, stopped_ns
from dora_pipe.schemas.batch import parts_of, staleness_of
from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    RoleStarted,
    RunStarted,
    StepCommitted,
    TakenGroup,
    TrajectoriesLogged,
    TrajectoryLogged,
)
from dora_pipe.schemas.rounds import (
    AnyDecision,
    End,
    GroupExpired,
    Outcome,
    Round,
    StopRun,
    TakeBatch,
    TakePart,
)

GONE_KEPT: Final = 64
"""Newest incarnations that are out and still identify late records of a worker that left."""

PLACES_KEPT: Final = 4096
"""Newest records kept to detect a report repeated for lack of an acknowledgment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    group: GroupHistory
    outcome: Outcome | Literal["open"]
    """`open`: a snapshot."""
    why: str
    ended_ns: int
    batch: Batch | None = None

    @property
    def step(self) -> int | None:
        return None if self.batch is None else self.batch.take.step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    fact: StepCommitted
    offset: int
    batch: Batch
    groups: tuple[GroupHistory, ...]
    stops: tuple[Stop, ...] = ()
    """Excluded from durations."""

    @property
    def results(self) -> list[TrajectoryLogged]:
        return [record for group in self.groups for record in group.results]

    @property
    def last(self) -> TrajectoryLogged | None:
        return self.batch.last

    @property
    def staleness(self) -> list[int]:
        return [staleness_of(self.fact.step, group.version) for group in self.fact.groups]

    @property
    def over_bound(self) -> int:
        """Groups trained after their deadline, against C3."""
        return sum(group.deadline < self.fact.step for group in self.fact.groups)

    @property
    def free_ns(self) -> int:
        """Time when the trainer became free, else when the batch was taken."""
        return self.batch.free_ns or self.batch.taken_ns

    @property
    def seconds(self) -> float | None:
        """Since the previous commit or the trainer's start."""
        return self._going_s(self.batch.free_ns, self.fact.at_ns) if self.batch.free_ns else None

    @property
    def stopped_s(self) -> float:
        """Stopped time since the previous commit."""
        return stopped_ns(self.stops, self.free_ns, self.fact.at_ns) / 1e9

    @property
    def waited_s(self) -> float:
        """Time of the free trainer without a batch or part."""
        if self.batch.parts:
            return sum(part.waited_s for part in self.parts)
        return self._going_s(self.free_ns, self.batch.taken_ns)

    @property
    def training_s(self) -> float:
        """Time to the commit since batch and trainer were ready."""
        parts = self.parts
        free_ns = parts[-1].free_ns if parts else self.free_ns
        return self._going_s(max(self.batch.taken_ns, free_ns), self.fact.at_ns)

    @property
    def parts(self) -> list[PartComputed]:
        return list(computed(self.batch.parts, self.fact.early_s, self.free_ns, self.stops))

    def _going_s(self, from_ns: int, until_ns: int) -> float:
        return max(0, until_ns - from_ns - stopped_ns(self.stops, from_ns, until_ns)) / 1e9

    @property
    def waited_for(self) -> TrajectoryLogged | None:
        """Record that the trainer waited for, if it did."""
        last = self.last if self.waited_s else None
        return last if last is not None and last.at_ns > self.free_ns else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEnded:
    batch: Batch
    outcome: Literal["refused", "overtaken", "failed"]
    why: str
    ended_ns: int


LedgerEvent = (
    GroupEnded | StepEnded | BatchEnded | RecordLogged | WorkerGone | EvaluationEnded | Mark
)


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class RunAccount:
    """Account of a run. Example: ``account.fact(offset, record)``, then ``account.round(round_,
    offset)``; both return events."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        """The first one; others do not count."""
        self.over = False
        """Stopped, or all steps done."""
        self.free_ns = 0
        """Last commit, or the trainer's start."""
        self.batch: Batch | None = None
        self.parts: list[PartTaken] = []
        self._groups = GroupLedger()
        self._places: dict[tuple[int, int], None] = {}
        self._gone: deque[int] = deque()
        """Incarnations that are out, oldest first."""
        self._marks = MarkAccount()
        self._next = 0
        self._trainer_incarnation = -1
        """-1 before a trainer started."""
        self._evaluating = Evaluating()

    @property
    def open(self) -> dict[str, GroupHistory]:
        return self._groups.open

    @property
    def workers(self) -> dict[int, WorkerHistory]:
        """Present workers by incarnation."""
        workers = self._groups.workers.items()
        return {incarnation: worker for incarnation, worker in workers if worker.gone is None}

    @property
    def named(self) -> dict[str, WorkerHistory]:
        """Newest incarnations."""
        return self._groups.named

    def present(self) -> list[WorkerHistory]:
        """Present workers by name."""
        return [worker for _, worker in sorted(self.named.items()) if worker.gone is None]

    @property
    def stops(self) -> Sequence[Stop]:
        return self._marks.stops

    @property
    def step(self) -> int:
        """Step in training, else the next one."""
        return self._next if self.batch is None else self.batch.take.step

    def fact(self, offset: int, fact: AnyControl) -> list[LedgerEvent]:
        next_ = self.step + (self.batch is not None)
        marks = self._marks.fact(offset, fact, open_=self.step, next_=next_)
        events = self._happened(offset, fact)
        return [*marks, *events] if marks else events

    def _happened(self, offset: int, fact: AnyControl) -> list[LedgerEvent]:
        match fact:
            case TrajectoriesLogged():
                records = (record for record in fact.facts() if self._is_new(record))
                judged = (self._groups.log(offset, record) for record in records)
                return [record for record in judged if record is not None]
            case StepCommitted():
                return self._committed(offset, fact)
            case RunStarted() if self.started is None:
                self.started = fact
                self._groups.scored_together = frozenset(fact.scored_together)
            case RoleStarted(role="trainer"):
                self._trainer_incarnation = fact.incarnation
                self.free_ns = max(self.free_ns, fact.at_ns)
            case BatchRefused() if self._trainer_incarnation in (-1, fact.incarnation):
                return self._refused(fact)
            case Command(verb="fail-batch"):
                return self._end_batch("failed", f"by {fact.user}", fact.at_ns)
            case _:
                return self._changed(self._groups.fact(offset, fact))
        return []

    def round(self, round_: Round, offset: int) -> list[LedgerEvent]:
        for observation in round_.observations:
            if isinstance(observation, GroupExpired) and (
                group := self.open.get(observation.group)
            ):
                group.expired = True
        events: list[LedgerEvent] = [*self._marks.round(round_)]
        for decision in round_.decisions:
            events += self._decided(decision, round_, offset)
        return events

    def now(self, group: str, now_ns: int) -> GroupEnded | None:
        """Return a snapshot of an open group, else None."""
        history, batch = self.open.get(group), self.batch
        if history is None:
            return None
        taken = batch is not None and any(member.group == group for member in batch.take.groups)
        held = batch if taken else None
        return GroupEnded(group=history, outcome="open", why="", ended_ns=now_ns, batch=held)

    def _decided(self, decision: AnyDecision, round_: Round, offset: int) -> list[LedgerEvent]:
        now_ns = round_.now_ns
        match decision:
            case TakePart():
                del self.parts[decision.part :]
                self.parts.append(self._part(decision, decision.groups, now_ns))
            case TakeBatch():
                return self._taken(decision, round_)
            case End():
                return self._ended(decision, now_ns)
            case StopRun():
                self.over = True
            case _:
                moment = Moment(round=round_.ordinal, offset=offset, now_ns=now_ns)
                return self._changed(self._groups.decision(decision, moment))
        return []

    def _ended(self, decision: End, now_ns: int) -> list[LedgerEvent]:
        why = decision.reason
        group = self._groups.end(decision.group, decision.outcome, why)
        if group is None:
            return []
        self._forget(group)
        ended = GroupEnded(group=group, outcome=decision.outcome, why=why, ended_ns=now_ns)
        if decision.outcome != "evaluated" or self.started is None:
            return [ended]
        note_end(group)
        evaluation = self._evaluating.ended(
            self.started, group.spec, samples_of(group.results), now_ns
        )
        return [ended] if evaluation is None else [ended, evaluation]

    def _taken(self, take: TakeBatch, round_: Round) -> list[LedgerEvent]:
        why = f"attempt {take.attempt} was taken"
        events = self._end_batch("overtaken", why, round_.now_ns)
        *_, rest = parts_of(take.groups, take.parts)
        last = self._part(take, rest, round_.now_ns)
        self.batch = batch_of(
            take,
            (*self.parts[: len(take.parts)], last),
            taken_ns=round_.now_ns,
            round_=round_.ordinal,
            free_ns=self.free_ns,
        )
        self.parts = []
        return events

    def _part(
        self, take: TakePart | TakeBatch, groups: Sequence[TakenGroup], now_ns: int
    ) -> PartTaken:
        histories = (self.open.get(taken.group) for taken in groups)
        return PartTaken(
            groups=tuple(taken.group for taken in groups),
            taken_ns=now_ns,
            reason=take.reason,
            last=last_of(history for history in histories if history is not None),
        )

    def _changed(self, changes: Sequence[Change]) -> list[LedgerEvent]:
        events: list[LedgerEvent] = []
        for change in changes:
            events.append(change)
            if isinstance(change, WorkerGone):
                worker, departure = change.worker, change.gone
                if departure.how == "fenced":
                    events += self._marks.gone(
                        worker.name,
                        worker.incarnation,
                        departure.why,
                        departure.at_ns,
                        open_=self.step,
                    )
                self._gone.append(worker.incarnation)
        while len(self._gone) > GONE_KEPT:
            del self._groups.workers[self._gone.popleft()]
        return events

    def _forget(self, group: GroupHistory) -> None:
        del self._groups.groups[group.spec.group]
        for record in group.records:
            del self._groups.logged[record.place]

    def _is_new(self, fact: TrajectoryLogged) -> bool:
        position = fact.partition, fact.offset
        if position in self._places:
            return False
        self._places[position] = None
        if len(self._places) > PLACES_KEPT:
            del self._places[next(iter(self._places))]
        return True

    def _refused(self, fact: BatchRefused) -> list[LedgerEvent]:
        take = None if self.batch is None else self.batch.take
        if take is None or (take.step, take.attempt) != (fact.step, fact.attempt):
            return []
        return self._end_batch("refused", fact.why, fact.at_ns)

    def _end_batch(
        self, outcome: Literal["refused", "overtaken", "failed"], why: str, at_ns: int
    ) -> list[LedgerEvent]:
        batch, self.batch = self.batch, None
        if batch is None:
            return []
        return [BatchEnded(batch=batch, outcome=outcome, why=why, ended_ns=at_ns)]

    def _committed(self, offset: int, fact: StepCommitted) -> list[LedgerEvent]:
        batch = self.batch
        if batch is None or (batch.take.step, batch.take.attempt) != (fact.step, fact.attempt):
            return []  # its batch had ended
        self.batch, self.free_ns, self._next = None, fact.at_ns, fact.step + 1
        why = f"batch of step {fact.step}, attempt {fact.attempt}"
        histories = [
            self._groups.end(taken.group, "trained", why, step=fact.step) for taken in fact.groups
        ]
        groups = tuple(group for group in histories if group is not None)
        trained: list[LedgerEvent] = [
            GroupEnded(
                group=group,
                outcome="trained",
                why=why,
                ended_ns=fact.at_ns,
                batch=batch,
            )
            for group in groups
        ]
        for group in groups:
            self._forget(group)
        stops = tuple(self.stops)
        ended = StepEnded(fact=fact, offset=offset, batch=batch, groups=groups, stops=stops)
        return [*trained, ended]
