"""Ledger of groups, requests and workers.

1. The first `trajectory logged` of a request's current attempt, by an incarnation that is not out,
   is bound while its group waits for it. Others are superseded, or fenced with their incarnation.
2. An attempt ends with its record, its failure, its release, its cancellation, or the loss of its
   worker. Losses and retryable failures are faults; a request fails with `max_attempts` faults.

Independent of the orchestrator's fold, so that audit can compare both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.ledger.history import (
    Attempt,
    AttemptOutcome,
    Departure,
    Gone,
    GroupHistory,
    Moment,
    RecordLogged,
    RecordStatus,
    RequestHistory,
    Scoring,
    WorkerGone,
    WorkerHistory,
    note_scores,
)
from dora_pipe.schemas.control import (
    AnyControl,
    GroupScored,
    RequestFailed,
    RequestReleased,
    TrajectoriesLogged,
    TrajectoryLogged,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)
from dora_pipe.schemas.identity import group_of, trajectory_id
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    Drain,
    EndSamples,
    Fence,
    Migrate,
    Outcome,
    Schedule,
    ScheduledRequest,
    ScoreGroup,
)

CAPABILITIES: Final = ("counter_sampling", "batch_invariant", "prefill_exact", "kv_export")
"""Required for bit-equal replay."""

JOINED_AGAIN: Final = "it joined again"
"""Reason if a worker rejoined before it was missed."""

Change = RecordLogged | WorkerGone

EngineKey = tuple[str, str, str, str]


@dataclass(slots=True, kw_only=True)
class EngineEntry:
    number: int
    workers: int = 0
    missing: tuple[str, ...] = ()


class GroupLedger:
    """Groups, requests and worker incarnations.

    A subclass overrides the hooks `wrong` and `sample_ended`, and may replace `groups` and
    `workers` by dictionaries that spill.
    """

    def __init__(self) -> None:
        self.groups: dict[str, GroupHistory] = {}
        self.open: dict[str, GroupHistory] = {}
        self.workers: dict[int, WorkerHistory] = {}
        self.named: dict[str, WorkerHistory] = {}
        self.engines: dict[EngineKey, EngineEntry] = {}
        self.logged: dict[tuple[int, int], RecordLogged] = {}
        """First log of each record, of groups in memory."""
        self.max_attempts = 0
        """0 while unknown."""
        self.scored_together: frozenset[str] = frozenset()

    def wrong(
        self,
        check: Literal["C2", "control"],
        subject: str,
        message: str,
        *,
        expected: object = "",
        actual: object = "",
    ) -> None:
        """Receive a record or decision that contradicts the log before it."""

    def sample_ended(self, group: GroupHistory) -> None:
        """Receive a group of which a trajectory or scoring ended."""

    def fact(self, offset: int, fact: AnyControl) -> list[Change]:
        """Apply a control record; return the judged records and the workers that are out."""
        match fact:
            case TrajectoriesLogged():
                judged = (self.log(offset, record) for record in fact.facts())
                return [record for record in judged if record is not None]
            case WorkerJoined():
                return self._joined(offset, fact)
            case WorkerReady():
                worker = self.workers.get(fact.incarnation)
                if worker is not None and worker.name == fact.worker and worker.gone is None:
                    worker.served = fact.version
                    worker.assigned.pop(fact.version, None)
            case WorkerLeft():
                worker = self.workers.get(fact.incarnation)
                if worker is not None and worker.name == fact.worker:
                    return self._depart(fact.incarnation, "left", fact.at_ns, fact.reason)
            case RequestReleased():
                self._released(offset, fact)
            case RequestFailed():
                self._failed(offset, fact)
            case GroupScored():
                self._scored(offset, fact)
        return []

    def decision(self, decision: AnyDecision, moment: Moment) -> list[Change]:
        now_ns = moment.now_ns
        match decision:
            case Schedule():
                for request in decision.requests():
                    self._placed(request, moment)
            case Dispatch():
                self._dispatched(decision, moment)
            case Migrate():
                attempt = self._attempt(decision.trajectory, decision.attempt, decision.incarnation)
                if attempt is not None:
                    attempt.migration_ns = now_ns
                    attempt.migration_target = decision.to
                    attempt.migration_reason = decision.reason
            case Cancel():
                attempt = self._attempt(decision.trajectory, decision.attempt, decision.incarnation)
                if attempt is not None:
                    _end(attempt, "cancelled", now_ns, decision.reason)
            case ScoreGroup():
                group = self.open.get(decision.spec.group)
                if group is not None and group.scoring is not None:
                    group.scoring.asked.append(decision)
                    group.scoring.open = True
            case Assign():
                worker = self.workers.get(decision.incarnation)
                if worker is not None and worker.gone is None:
                    worker.target = decision.version
                    worker.assigned[decision.version] = now_ns
            case Drain():
                if (worker := self.workers.get(decision.incarnation)) is not None:
                    worker.draining = True
            case Fence():
                return self._depart(decision.incarnation, "fenced", now_ns, decision.reason)
            case EndSamples():
                self._end_samples(decision)
        return []

    def request(self, trajectory: str) -> RequestHistory | None:
        group = self._group(group_of(trajectory))
        return None if group is None else group.requests.get(trajectory)

    def expire(self, group: GroupHistory) -> None:
        group.expired = True
        self.sample_ended(group)

    def end(
        self, name: str, outcome: Outcome, why: str, *, step: int | None = None, part: int = 0
    ) -> GroupHistory | None:
        group = self._group(name)
        if group is None:
            message = f"is {_outcome(outcome, step)} but was never dispatched"
            self.wrong("C2", name, message)
            return None
        if group.outcome is not None:
            first = f"{_outcome(group.outcome, group.step)} and nothing after it"
            second = _outcome(outcome, step)
            self.wrong("C2", name, "has two outcomes", expected=first, actual=second)
            return None
        group.outcome, group.why, group.step, group.part = outcome, why, step, part
        return self.open.pop(name)

    def log(self, offset: int, fact: TrajectoryLogged) -> RecordLogged | None:
        """Judge a logged record; None if it is repeated for lack of an acknowledgment."""
        group, worker = self._group(group_of(fact.trajectory)), self.workers.get(fact.incarnation)
        request = None if group is None else group.requests.get(fact.trajectory)
        if group is None or request is None or worker is None:
            missing = f"incarnation {fact.incarnation} never joined"
            missing = "was never dispatched" if request is None else missing
            self._wrong(offset, f"logs {fact.trajectory}, but {missing}")
            out = worker is None or worker.departure == "fenced"
            status: RecordStatus = "fenced" if out else "superseded"
            return RecordLogged(fact=fact, status=status, offset=offset)
        if not request.was_placed(fact.attempt, fact.worker, fact.incarnation):
            what = f"attempt {fact.attempt} of {fact.trajectory} by {fact.worker}"
            self._wrong(offset, f"logs {what}, but no decision scheduled it there")
        status = _status(fact, group, request, worker)
        logged = RecordLogged(fact=fact, status=status, offset=offset, engine=worker.engine)
        first = self.logged.get(logged.place)
        if first is not None:
            if first.fact != fact:
                self._wrong(offset, f"logs the record at {logged.place} again with other fields")
            return None
        self.logged[logged.place] = logged
        group.records.append(logged)
        if status == "bound":
            request.bound = logged
            group.valid += fact.reward is not None
            _end(request.attempts[-1], "logged", fact.at_ns)
            self.sample_ended(group)
        return logged

    def _group(self, name: str) -> GroupHistory | None:
        return self.open.get(name) or self.groups.get(name)

    def _joined(self, offset: int, fact: WorkerJoined) -> list[Change]:
        changes: list[Change] = []
        before = self.named.get(fact.worker)
        if before is not None:
            changes += self._depart(before.incarnation, "fenced", fact.at_ns, JOINED_AGAIN)
        key = (fact.engine, fact.engine_version, fact.device, fact.dtype)
        engine = self.engines.setdefault(key, EngineEntry(number=len(self.engines)))
        engine.workers += 1
        engine.missing = tuple(name for name in CAPABILITIES if name not in fact.declares)
        worker = WorkerHistory(joined=fact, incarnation=offset, engine=engine.number)
        self.workers[offset] = self.named[fact.worker] = worker
        return changes

    def _depart(self, incarnation: int, how: Departure, at_ns: int, why: str) -> list[Change]:
        worker = self.workers.get(incarnation)
        if worker is None or worker.gone is not None:
            return []
        worker.gone = Gone(how=how, why=why, at_ns=at_ns)
        for group in list(self.open.values()):
            for request in group.requests.values():
                attempt = request.attempts[-1] if request.attempts else None
                if attempt and attempt.incarnation == incarnation and not attempt.outcome:
                    _end(attempt, how, at_ns, why)
                    self._lost(group, request, fault=how != "left")
            scoring = group.scoring
            if scoring and (asked := scoring.request) and asked.incarnation == incarnation:
                self._not_scored(group, scoring, fault=how != "left")
        return [WorkerGone(worker=worker, gone=worker.gone)]

    def _dispatched(self, decision: Dispatch, moment: Moment) -> None:
        spec = decision.spec
        if spec.group in self.groups:
            message = f"is dispatched a second time in round {moment.round}"
            self.wrong("C2", spec.group, message)
            return
        names = (trajectory_id(spec.group, sample) for sample in range(spec.samples))
        group = GroupHistory(
            spec=spec,
            reason=decision.reason,
            round=moment.round,
            offset=moment.offset,
            dispatched_ns=moment.now_ns,
            requests={name: RequestHistory(trajectory=name) for name in names},
            scoring=Scoring() if spec.source in self.scored_together else None,
        )
        self.groups[spec.group] = self.open[spec.group] = group

    def _placed(self, request: ScheduledRequest, moment: Moment) -> None:
        history = self.request(request.trajectory)
        if history is None:
            return
        worker = self.workers.get(request.incarnation)
        joined = None if worker is None else worker.joined
        history.attempts.append(
            Attempt(
                attempt=request.attempt,
                worker=request.worker,
                incarnation=request.incarnation,
                host=None if joined is None else joined.host,
                engine=None if joined is None else f"{joined.engine} {joined.engine_version}",
                round=moment.round,
                scheduled_ns=moment.now_ns,
                reason=request.reason,
                resumed=0 if request.resume is None else request.resume.tokens,
            )
        )

    def _attempt(self, trajectory: str, attempt: int, incarnation: int) -> Attempt | None:
        """Return the newest attempt while it runs, if it is the given one."""
        group = self.open.get(group_of(trajectory))
        request = None if group is None else group.requests.get(trajectory)
        last = request.attempts[-1] if request is not None and request.attempts else None
        if last is None or last.outcome or last.key != (attempt, incarnation):
            return None
        return last

    def _released(self, offset: int, fact: RequestReleased) -> None:
        request = self.request(fact.trajectory)
        if request is None:
            self._wrong(offset, f"{fact.trajectory} is released, which was never dispatched")
            return
        attempt = self._attempt(fact.trajectory, fact.attempt, fact.incarnation)
        if attempt is None or self.open[group_of(fact.trajectory)].closed:
            return  # a decision cancels what a closed group no longer needs
        if not request.moving:
            self._wrong(offset, f"{fact.trajectory} is released without a decision to move it")
            return
        _end(attempt, "migrated", fact.at_ns)

    def _failed(self, offset: int, fact: RequestFailed) -> None:
        request = self.request(fact.trajectory)
        if request is None:
            self._wrong(offset, f"{fact.trajectory} failed, which was never dispatched")
            return
        attempt = self._attempt(fact.trajectory, fact.attempt, fact.incarnation)
        group = self.open.get(group_of(fact.trajectory))
        if attempt is None or group is None or group.closed:
            return
        attempt.retryable = fact.retryable
        _end(attempt, "failed", fact.at_ns, f"{fact.error}: {fact.message}")
        if fact.retryable:
            self._lost(group, request, fault=True)
        elif not request.over:
            self._fail(group, request)

    def _end_samples(self, decision: EndSamples) -> None:
        group = self._group(decision.group)
        for sample in () if group is None else decision.samples:
            request = group and group.requests.get(trajectory_id(decision.group, sample))
            if request and not request.over:
                request.left = decision.outcome

    def _scored(self, offset: int, fact: GroupScored) -> None:
        """Book a score; only the first of the newest attempt counts."""
        group = self._group(fact.group)
        scoring = None if group is None else group.scoring
        key = (fact.attempt, fact.worker, fact.incarnation)
        asked = None if scoring is None else scoring.was_asked(*key)
        if group is None or scoring is None or asked is None:
            what = f"attempt {fact.attempt} of {fact.group} by {fact.worker}"
            self._wrong(offset, f"scores {what}, but no decision asked for it")
            return
        named = [taken.trajectory for taken in asked.trajectories]
        if not fact.error and [sample.trajectory for sample in fact.samples] != named:
            message = f"scores other trajectories of {fact.group} than it was asked about"
            self._wrong(offset, message)
            return
        worker = self.workers.get(fact.incarnation)
        counts = scoring.request is asked and group.outcome is None
        if not counts or worker is None or worker.gone is not None:
            return
        if fact.error:
            self._not_scored(group, scoring, fault=True, final=not fact.retryable)
            return
        scoring.open = False
        scoring.answer = fact
        note_scores(group, fact)
        self.sample_ended(group)

    def _not_scored(
        self, group: GroupHistory, scoring: Scoring, *, fault: bool, final: bool = False
    ) -> None:
        scoring.open = False
        scoring.faults += fault
        if final or (fault and self.max_attempts and scoring.faults >= self.max_attempts):
            scoring.failed = True
            self.sample_ended(group)

    def _lost(self, group: GroupHistory, request: RequestHistory, *, fault: bool) -> None:
        if request.over:
            return
        request.faults += fault
        if self.max_attempts and request.faults >= self.max_attempts and not group.closed:
            self._fail(group, request)

    def _fail(self, group: GroupHistory, request: RequestHistory) -> None:
        request.failed = True
        self.sample_ended(group)

    def _wrong(self, offset: int, message: str) -> None:
        self.wrong("control", f"control:{offset}", message)


def _end(attempt: Attempt, outcome: AttemptOutcome, at_ns: int, why: str = "") -> None:
    attempt.outcome, attempt.ended_ns, attempt.why = outcome, at_ns, why


def _status(
    fact: TrajectoryLogged, group: GroupHistory, request: RequestHistory, worker: WorkerHistory
) -> RecordStatus:
    if worker.gone is not None:
        return "superseded" if worker.gone.how == "left" else "fenced"
    attempt = request.running
    if attempt is None or group.outcome is not None or group.closed:
        return "superseded"
    return "bound" if attempt.key == (fact.attempt, fact.incarnation) else "superseded"


def _outcome(outcome: Outcome, step: int | None) -> str:
    return outcome if step is None else f"{outcome}({step})"
