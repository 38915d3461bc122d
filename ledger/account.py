"""Outcomes of groups and steps, from control and decisions alone.

A record counts if it is the first `trajectory logged` of a request's current attempt, by an
incarnation that is not out, while the group waits. Others are `superseded`, or `fenced` with their
incarnation. Memory depends on what is open. Independent of the orchestrator's fold, so that audit
can compare both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.ledger.evaluations import Evaluating, EvaluationEnded, samples_of
from dora_pipe.ledger.history import (
    Attempt,
    AttemptOutcome,
    Batch,
    GroupHistory,
    PartComputed,
    PartTaken,
    RequestHistory,
    WorkerGone,
    WorkerHistory,
    batch_of,
    computed,
    last_of,
    note_end,
    note_scores,
)
from dora_pipe.ledger.marks import Mark, MarkAccount, Stop, stopped_ns
from dora_pipe.schemas.batch import parts_of, staleness_of
from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    GroupScored,
    RequestFailed,
    RequestReleased,
    RoleStarted,
    RunStarted,
    StepCommitted,
    TakenGroup,
    TrajectoriesLogged,
    TrajectoryLogged,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    Drain,
    End,
    EndSamples,
    Fence,
    GroupExpired,
    Migrate,
    Outcome,
    Round,
    Schedule,
    ScheduledRequest,
    ScoreGroup,
    StopRun,
    TakeBatch,
    TakePart,
)

RecordStatus = Literal["bound", "superseded", "fenced"]
"""Counts for its group; replaced by another; its worker was out."""

REPORTS_KEPT: Final = 16
"""Reports per worker to detect a repeated one."""

JOINED_AGAIN: Final = "it joined again"
"""Reason if a worker rejoined before it was missed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEnded:
    group: GroupHistory
    outcome: Outcome | Literal["open"]
    """`open`: a snapshot."""
    why: str
    ended_ns: int
    batch: Batch | None = None
    batch_last: TrajectoryLogged | None = None
    """Record that the batch waited for."""

    @property
    def step(self) -> int | None:
        return None if self.batch is None else self.batch.take.step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """A committed step with the known groups of its batch."""

    fact: StepCommitted
    offset: int
    batch: Batch
    groups: tuple[GroupHistory, ...]
    stops: tuple[Stop, ...] = ()
    """Excluded from durations."""

    @property
    def results(self) -> list[TrajectoryLogged]:
        return [one for group in self.groups for one in group.results]

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
            return sum(one.waited_s for one in self.parts)
        return self._going_s(self.free_ns, self.batch.taken_ns)

    @property
    def training_s(self) -> float:
        """Time to the commit since batch and trainer were ready."""
        found = self.parts
        free_ns = found[-1].free_ns if found else self.free_ns
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLogged:
    fact: TrajectoryLogged
    status: RecordStatus
    offset: int


Event = GroupEnded | StepEnded | BatchEnded | RecordLogged | WorkerGone | EvaluationEnded | Mark


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


class RunAccount:
    """Account of a run. Example: ``account.fact(offset, record)``, then ``account.round(round_,
    offset)``; both return events."""

    def __init__(self) -> None:
        self.started: RunStarted | None = None
        """The first one; others do not count."""
        self.open: dict[str, GroupHistory] = {}
        self.workers: dict[int, WorkerHistory] = {}
        """Present workers by incarnation."""
        self.named: dict[str, WorkerHistory] = {}
        """Newest incarnations."""
        self.over = False
        """Stopped, or all steps done."""
        self.free_ns = 0
        """Last commit, or the trainer's start."""
        self.batch: Batch | None = None
        self.parts: list[PartTaken] = []
        """Parts of the next batch."""
        self._reports: dict[int, deque[TrajectoriesLogged]] = {}
        """Newest reports by incarnation, including the last few that are out."""
        self._marks = MarkAccount()
        self._next = 0
        self._trainer_incarnation = -1
        """-1 before a trainer started."""
        self._evaluating = Evaluating()

    def present(self) -> list[WorkerHistory]:
        """Present workers by name."""
        return [one for _, one in sorted(self.named.items()) if one.gone is None]

    @property
    def stops(self) -> Sequence[Stop]:
        return self._marks.stops

    @property
    def step(self) -> int:
        """Step in training, else the next one."""
        return self._next if self.batch is None else self.batch.take.step

    def fact(self, offset: int, fact: AnyControl) -> list[Event]:
        """Apply a control record and return the resulting events."""
        next_ = self.step + (self.batch is not None)
        marks = self._marks.fact(offset, fact, open_=self.step, next_=next_)
        events = self._happened(offset, fact)
        return [*marks, *events] if marks else events

    def _happened(self, offset: int, fact: AnyControl) -> list[Event]:
        match fact:
            case TrajectoriesLogged():
                found = () if self._repeated(fact) else fact.facts()
                return [self._logged(one, offset) for one in found]
            case StepCommitted():
                return self._committed(offset, fact)
            case RunStarted():
                self.started = self.started or fact
            case WorkerJoined():
                return self._joined(offset, fact)
            case WorkerReady() if (worker := self.workers.get(fact.incarnation)) is not None:
                worker.served = fact.version
                worker.assigned.pop(fact.version, None)
            case WorkerLeft():
                return self._depart(fact.incarnation, "left", fact.at_ns, fact.reason)
            case RequestReleased():
                self._end_attempt(
                    fact.trajectory, fact.attempt, fact.incarnation, "migrated", fact.at_ns
                )
            case RequestFailed():
                self._failed(fact)
            case GroupScored() if (group := self.open.get(fact.group)) is not None:
                if fact.incarnation in self.workers:
                    note_scores(group, fact)
            case RoleStarted(role="trainer"):
                self._trainer_incarnation = fact.incarnation
                self.free_ns = max(self.free_ns, fact.at_ns)
            case BatchRefused() if self._trainer_incarnation in (-1, fact.incarnation):
                return self._refused(fact)
            case Command(verb="fail-batch"):
                return self._end_batch("failed", f"by {fact.user}", fact.at_ns)
            case _:
                pass
        return []

    def round(self, round_: Round, offset: int) -> list[Event]:
        """Apply a round after its events."""
        for seen in round_.observations:
            if isinstance(seen, GroupExpired) and (group := self.open.get(seen.group)):
                group.expired = True
        found: list[Event] = [*self._marks.round(round_)]
        for decision in round_.decisions:
            found += self._decided(decision, round_, offset)
        return found

    def now(self, group: str, now_ns: int) -> GroupEnded | None:
        """Return a snapshot of an open group, else None."""
        history, batch = self.open.get(group), self.batch
        if history is None:
            return None
        taken = batch is not None and any(one.group == group for one in batch.take.groups)
        held = batch if taken else None
        return GroupEnded(group=history, outcome="open", why="", ended_ns=now_ns, batch=held)

    def _decided(self, decision: AnyDecision, round_: Round, offset: int) -> list[Event]:
        now_ns = round_.now_ns
        match decision:
            case Schedule():
                for request in decision.requests():
                    self._placed(request, round_)
            case Dispatch(spec=spec):
                self.open[spec.group] = GroupHistory(
                    spec=spec,
                    reason=decision.reason,
                    round=round_.ordinal,
                    offset=offset,
                    dispatched_ns=now_ns,
                )
            case Assign() if (worker := self.workers.get(decision.incarnation)) is not None:
                worker.target = decision.version
                worker.assigned[decision.version] = now_ns
            case Drain() if (worker := self.workers.get(decision.incarnation)) is not None:
                worker.draining = True
            case ScoreGroup() if (group := self.open.get(decision.spec.group)) is not None:
                group.scoring = group.asked = decision
            case Migrate():
                self._asked_to_move(decision, now_ns)
            case Cancel():
                at = (decision.trajectory, decision.attempt, decision.incarnation)
                self._end_attempt(*at, "cancelled", now_ns, decision.reason)
            case Fence():
                return self._depart(decision.incarnation, "fenced", now_ns, decision.reason)
            case TakePart():
                del self.parts[decision.part :]
                self.parts.append(self._part(decision, decision.groups, now_ns))
            case TakeBatch():
                return self._taken(decision, round_)
            case End():
                return self._ended(decision, now_ns)
            case EndSamples() if (group := self.open.get(decision.group)) is not None:
                group.left = dict.fromkeys(decision.samples, decision.outcome)
            case StopRun():
                self.over = True
            case _:
                pass
        return []

    def _ended(self, decision: End, now_ns: int) -> list[Event]:
        group = self.open.pop(decision.group, None)
        if group is None:
            return []
        why = decision.reason
        if decision.outcome == "evaluated" and self.started is not None:
            note_end(group, self.started)
        ended = GroupEnded(group=group, outcome=decision.outcome, why=why, ended_ns=now_ns)
        return [ended, *self._evaluated(ended)] if ended.outcome == "evaluated" else [ended]

    def _evaluated(self, ended: GroupEnded) -> list[Event]:
        if self.started is None:
            return []
        group = ended.group
        found = self._evaluating.ended(
            self.started, group.spec, samples_of(group.results), ended.ended_ns
        )
        return [] if found is None else [found]

    def _taken(self, take: TakeBatch, round_: Round) -> list[Event]:
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
        known = (self.open.get(one.group) for one in groups)
        return PartTaken(
            groups=tuple(one.group for one in groups),
            taken_ns=now_ns,
            reason=take.reason,
            last=last_of(one for one in known if one is not None),
        )

    def _joined(self, offset: int, fact: WorkerJoined) -> list[Event]:
        events: list[Event] = []
        before = self.named.get(fact.worker)
        if before is not None and before.gone is None:
            events += self._depart(before.incarnation, "fenced", fact.at_ns, JOINED_AGAIN)
        self.named[fact.worker] = WorkerHistory(joined=fact, incarnation=offset)
        self.workers[offset] = self.named[fact.worker]
        return events

    def _failed(self, fact: RequestFailed) -> None:
        found = self._present(fact.trajectory, fact.attempt, fact.incarnation)
        if found is not None:
            found[1].retryable = fact.retryable
            why = f"{fact.error}: {fact.message}"
            at = (fact.trajectory, fact.attempt, fact.incarnation)
            self._end_attempt(*at, "failed", fact.at_ns, why)

    def _placed(self, request: ScheduledRequest, round_: Round) -> None:
        group = self.open.get(request.spec.group)
        if group is None:
            return
        name = request.trajectory
        history = group.requests.get(name)
        if history is None:
            history = group.requests[name] = RequestHistory(trajectory=name)
        history.attempts.append(
            Attempt(
                attempt=request.attempt,
                worker=request.worker,
                incarnation=request.incarnation,
                host=self.workers.get(request.incarnation),
                round=round_.ordinal,
                scheduled_ns=round_.now_ns,
                reason=request.reason,
                resumed=0 if request.resume is None else request.resume.tokens,
            )
        )

    def _present(
        self, trajectory: str, attempt: int, incarnation: int
    ) -> tuple[RequestHistory, Attempt] | None:
        """Return the current, unended attempt if it is the given one."""
        group = self.open.get(group_of(trajectory))
        request = None if group is None else group.requests.get(trajectory)
        if request is None:
            return None
        present = request.attempts[-1]
        if present.outcome or (present.attempt, present.incarnation) != (attempt, incarnation):
            return None
        return request, present

    def _end_attempt(
        self,
        trajectory: str,
        attempt: int,
        incarnation: int,
        outcome: AttemptOutcome,
        at_ns: int,
        why: str = "",
    ) -> None:
        found = self._present(trajectory, attempt, incarnation)
        if found is not None:
            found[1].outcome, found[1].ended_ns, found[1].why = outcome, at_ns, why

    def _repeated(self, fact: TrajectoriesLogged) -> bool:
        """Detect a report repeated for lack of an acknowledgment."""
        reports = self._reports.setdefault(fact.incarnation, deque(maxlen=REPORTS_KEPT))
        if fact in reports:
            return True
        reports.append(fact)
        if len(self._reports) > len(self.workers) + REPORTS_KEPT:
            del self._reports[next(one for one in self._reports if one not in self.workers)]
        return False

    def _logged(self, fact: TrajectoryLogged, offset: int) -> RecordLogged:
        if fact.incarnation not in self.workers:
            return RecordLogged(fact=fact, status=self._outdated(fact), offset=offset)
        found = self._present(fact.trajectory, fact.attempt, fact.incarnation)
        group = self.open.get(group_of(fact.trajectory))
        if found is None or group is None or group.closed:
            return RecordLogged(fact=fact, status="superseded", offset=offset)
        request, attempt = found
        group.valid += fact.reward is not None
        request.logged, request.offset = fact, offset
        attempt.outcome, attempt.ended_ns = "logged", fact.at_ns
        return RecordLogged(fact=fact, status="bound", offset=offset)

    def _outdated(self, fact: TrajectoryLogged) -> RecordStatus:
        group = self.open.get(group_of(fact.trajectory))
        request = None if group is None else group.requests.get(fact.trajectory)
        attempts = () if request is None else request.attempts
        left = any(
            one.incarnation == fact.incarnation and one.outcome == "left" for one in attempts
        )
        return "superseded" if left else "fenced"

    def _asked_to_move(self, decision: Migrate, now_ns: int) -> None:
        found = self._present(decision.trajectory, decision.attempt, decision.incarnation)
        if found is not None:
            _, attempt = found
            attempt.migration_ns = now_ns
            attempt.migration_target = decision.to
            attempt.migration_reason = decision.reason

    def _depart(
        self, incarnation: int, how: Literal["left", "fenced"], at_ns: int, why: str
    ) -> list[Event]:
        worker = self.workers.pop(incarnation, None)
        if worker is None:
            return []
        gone = worker.gone = WorkerGone(worker=worker, how=how, why=why, at_ns=at_ns)
        marks: list[Mark] = []
        if how == "fenced":
            marks = self._marks.gone(worker.name, incarnation, why, at_ns, open_=self.step)
        for group in self.open.values():
            for request in group.requests.values():
                attempt = request.attempts[-1]
                if attempt.incarnation == incarnation and not attempt.outcome:
                    attempt.outcome, attempt.ended_ns, attempt.why = how, at_ns, why
        return [gone, *marks]

    def _refused(self, fact: BatchRefused) -> list[Event]:
        take = None if self.batch is None else self.batch.take
        if take is None or (take.step, take.attempt) != (fact.step, fact.attempt):
            return []
        why = "; ".join(f"{one.trajectory or one.group}: {one.reason}" for one in fact.offenders)
        return self._end_batch("refused", why, fact.at_ns)

    def _end_batch(
        self, outcome: Literal["refused", "overtaken", "failed"], why: str, at_ns: int
    ) -> list[Event]:
        batch, self.batch = self.batch, None
        if batch is None:
            return []
        return [BatchEnded(batch=batch, outcome=outcome, why=why, ended_ns=at_ns)]

    def _committed(self, offset: int, fact: StepCommitted) -> list[Event]:
        batch = self.batch
        if batch is None or (batch.take.step, batch.take.attempt) != (fact.step, fact.attempt):
            return []  # its batch had ended
        self.batch, self.free_ns, self._next = None, fact.at_ns, fact.step + 1
        popped = (self.open.pop(one.group, None) for one in fact.groups)
        groups = tuple(one for one in popped if one is not None)
        trained: list[Event] = [
            GroupEnded(
                group=one,
                outcome="trained",
                why=f"batch of step {fact.step}, attempt {fact.attempt}",
                ended_ns=fact.at_ns,
                batch=batch,
                batch_last=batch.last,
            )
            for one in groups
        ]
        stops = tuple(self.stops)
        ended = StepEnded(fact=fact, offset=offset, batch=batch, groups=groups, stops=stops)
        return [*trained, ended]
