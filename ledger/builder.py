"""Build catalogue rows: once for what has ended, on request for what is open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import quantiles
from typing import Any, Final, TypeVar

import msgspec

from dora_pipe.ledger.account import (
    BatchEnded,
    GroupEnded,
    LedgerEvent,
    RunAccount,
    StepEnded,
    mean,
)
from dora_pipe.ledger.evaluations import EvaluationEnded
from dora_pipe.ledger.history import (
    Attempt,
    Batch,
    GroupHistory,
    RecordLogged,
    RequestHistory,
    WorkerGone,
    WorkerHistory,
    parts_by_task,
    parts_of,
    rewards_of,
)
from dora_pipe.ledger.marks import Mark
from dora_pipe.ledger.tables import (
    AttemptRow,
    BatchRow,
    EventRow,
    FailureRow,
    GroupRow,
    MarkRow,
    PartRow,
    RecordRow,
    Row,
    RunRow,
    ServedVersionRow,
    StepRow,
    TrajectoryRow,
    VersionRow,
    WorkerRow,
)
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.control import (
    AnyControl,
    BatchRefused,
    Command,
    RequestFailed,
    RoleStarted,
    RunStarted,
    VersionsDropped,
    WeightsAdopted,
    WorkerJoined,
    WorkerReady,
    error_class,
)
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Dispatch,
    End,
    EndSamples,
    Round,
    Schedule,
    StopRun,
    TakeBatch,
    TakePart,
)
from dora_pipe.schemas.wire import canonical, kebab

MESSAGE_MAX: Final = 2000
"""Kept characters of an error message."""

_WHO: Final = ("worker", "trajectory", "group")
"""First present field is the subject."""

AnyRow = TypeVar("AnyRow", bound=Row)


class CatalogueBuilder:
    """Rows of one run: call `fact` and `round`, then `drain` for ended rows and `live` for open
    ones."""

    def __init__(self) -> None:
        self.account = RunAccount()
        self.first_ns = 0
        self.last_ns = 0
        """Range of recorded times; 0 before the first."""
        self.rounds = 0
        self._rows: list[Row] = []

    @property
    def made(self) -> int:
        return len(self._rows)

    def drain(self) -> list[Row]:
        """Return rows that ended since the last call."""
        rows, self._rows = self._rows, []
        return rows

    def fact(self, offset: int, fact: AnyControl) -> None:
        if not isinstance(fact, Command | VersionsDropped):  # allowed after the run is over
            self._seen(fact.at_ns)
        match fact:
            case RunStarted() if self.account.started is None:
                self._published(0, fact.policy.digest, fact.at_ns)
            case WorkerJoined():
                self._event(fact.at_ns, "worker-joined", fact.worker, f"{fact.slots} slots")
            case WorkerReady():
                worker = self.account.workers.get(fact.incarnation)
                assigned_ns = None if worker is None else worker.assigned.get(fact.version)
                times = {"assigned_ns": assigned_ns, "ready_ns": fact.at_ns}
                self._rows.append(_row(ServedVersionRow, fact, **times))
            case RequestFailed():
                message = fact.message[:MESSAGE_MAX]
                row = _row(FailureRow, fact, trajectory_id=fact.trajectory, message=message)
                self._rows.append(row)
            case RoleStarted():
                self._event(
                    fact.at_ns, "role-started", fact.role, f"incarnation {fact.incarnation}"
                )
            case BatchRefused():
                self._event(fact.at_ns, "batch-refused", f"step {fact.step}", fact.why)
            case Command():
                description = f"by {fact.user}: {canonical(fact.args).decode()}"
                self._event(fact.at_ns, "command", fact.verb, description)
            case WeightsAdopted():
                self._event(fact.at_ns, "weights-adopted", f"step {fact.step}", fact.reason)
            case _:
                pass
        self._happened(self.account.fact(offset, fact))

    def round(self, round_: Round, offset: int) -> None:
        self.rounds += 1
        self._seen(round_.now_ns)
        for observation in round_.observations:
            who = next(filter(None, (getattr(observation, name, "") for name in _WHO)), "")
            if who:
                kind = kebab(type(observation).__name__)
                self._event(round_.now_ns, kind, who, "", round_.ordinal)
        for decision in round_.decisions:
            if isinstance(decision, Dispatch):
                self._skipped(decision, round_)
            elif not isinstance(decision, Schedule):
                self._decided(decision, round_)
        self._happened(self.account.round(round_, offset))

    def live(self) -> Iterator[Row]:
        if self.account.started is not None:
            yield self._run_row(self.account.started)
        if self.account.batch is not None:
            yield _batch_row(self.account.batch)
        yield from map(_worker_row, self.account.workers.values())
        for name in self.account.open:
            now = self.account.now(name, self.last_ns)
            assert now is not None, name
            yield from _rows_of_group(now)

    def _seen(self, at_ns: int) -> None:
        if not at_ns:
            return  # no time recorded
        self.first_ns = min(self.first_ns, at_ns) if self.first_ns else at_ns
        self.last_ns = max(self.last_ns, at_ns)

    def _event(
        self, at_ns: int, kind: str, subject: str, reason: str, round_: int | None = None
    ) -> None:
        row = EventRow(at_ns=at_ns, round=round_, kind=kind, subject=subject, reason=reason)
        self._rows.append(row)

    def _skipped(self, decision: Dispatch, round_: Round) -> None:
        spec = decision.spec
        for row in decision.skipped:
            who, why = f"{spec.source}#{row}", f"it is solved; {spec.group} is dispatched"
            self._event(round_.now_ns, "row-skipped", who, why, round_.ordinal)

    def _decided(self, decision: AnyDecision, round_: Round) -> None:
        match decision:
            case TakePart() | TakeBatch():
                subject = f"step {decision.step}"
            case End() | EndSamples():
                subject = decision.group
            case StopRun():
                subject = "" if self.account.started is None else self.account.started.run
            case _:
                subject = getattr(decision, "trajectory", "") or getattr(decision, "worker", "")
        kind = kebab(type(decision).__name__)
        self._event(round_.now_ns, kind, subject, decision.reason, round_.ordinal)

    def _published(self, version: int, digest: str, at_ns: int) -> None:
        self._rows.append(VersionRow(version=version, digest=digest, published_ns=at_ns))

    def _happened(self, events: Iterable[LedgerEvent]) -> None:
        for event in events:
            match event:
                case RecordLogged():
                    self._rows.append(_record_row(event))
                case GroupEnded():
                    self._rows += _rows_of_group(event)
                case StepEnded():
                    self._step_ended(event)
                case BatchEnded(ended_ns=ended_ns, outcome=outcome, why=why):
                    row = _batch_row(event.batch, ended_ns=ended_ns, outcome=outcome, why=why)
                    self._rows.append(row)
                case WorkerGone():
                    self._gone(event)
                case EvaluationEnded():
                    pass  # see the view `evaluations`
                case Mark():
                    self._rows.append(_row(MarkRow, event))

    def _step_ended(self, event: StepEnded) -> None:
        fact = event.fact
        self._rows.append(_step_row(event))
        self._rows.append(_batch_row(event.batch, ended_ns=fact.at_ns, outcome="committed"))
        self._rows += _part_rows(event)
        self._published(fact.step + 1, fact.policy.digest, fact.at_ns)

    def _gone(self, event: WorkerGone) -> None:
        self._rows.append(_worker_row(event.worker))
        if event.gone.how == "left":
            self._event(event.gone.at_ns, "worker-left", event.worker.name, event.gone.why)

    def _run_row(self, fact: RunStarted) -> RunRow:
        lineage = fact.lineage
        return _row(
            RunRow,
            fact,
            first_ns=self.first_ns,
            started_ns=fact.at_ns,
            last_ns=self.last_ns,
            stopped=self.account.over,
            rounds=self.rounds,
            config=canonical(fact.config).decode(),
            lineage_run=None if lineage is None else lineage.run,
            lineage_step=None if lineage is None else lineage.step,
        )


def _row(kind: type[AnyRow], record: object | None, **columns: Any) -> AnyRow:
    """Take the other columns from the fields of a record; null without one."""
    same = (name for name in kind.__struct_fields__ if name not in columns)
    return kind(**{name: record and getattr(record, name) for name in same}, **columns)


def _worker_row(worker: WorkerHistory) -> WorkerRow:
    fact, departure = worker.joined, worker.gone
    return _row(
        WorkerRow,
        fact,
        incarnation=worker.incarnation,
        joined_ns=fact.at_ns,
        gone_ns=None if departure is None else departure.at_ns,
        departure=None if departure is None else departure.how,
        end_reason=None if departure is None else departure.why,
    )


def _record_row(event: RecordLogged) -> RecordRow:
    fact = event.fact
    return _row(
        RecordRow,
        fact,
        trajectory_id=fact.trajectory,
        status=event.status,
        logged_ns=fact.at_ns,
        control_offset=event.offset,
        record_offset=fact.offset,
        size_bytes=fact.bytes,
    )


def _batch_row(
    batch: Batch, *, ended_ns: int | None = None, outcome: str | None = None, why: str = ""
) -> BatchRow:
    return BatchRow(
        step=batch.take.step,
        attempt=batch.take.attempt,
        round=batch.round,
        free_ns=batch.free_ns or None,
        taken_ns=batch.taken_ns,
        ended_ns=ended_ns,
        groups=len(batch.take.groups),
        parts=len(batch.take.parts) + 1,
        last_trajectory=None if batch.last is None else batch.last.trajectory,
        batch_reason=batch.take.reason,
        outcome=outcome,
        end_reason=why,
    )


def _part_rows(event: StepEnded) -> Iterator[PartRow]:
    results = {group.spec.group: group.results for group in event.groups}
    for part in event.parts:
        taken = part.taken
        records = [record for name in taken.groups for record in results.get(name, ())]
        yield _row(
            PartRow,
            part,
            step=event.fact.step,
            taken_ns=taken.taken_ns,
            last_trajectory=None if taken.last is None else taken.last.trajectory,
            batch_reason=taken.reason,
            groups=len(taken.groups),
            trajectories=len(records),
            tokens=sum(record.tokens for record in records),
        )


def _step_row(event: StepEnded) -> StepRow:
    fact, batch = event.fact, event.batch
    results = event.results
    rewards = rewards_of(results)
    means = [
        group_mean for group in event.groups if (group_mean := mean(group.rewards)) is not None
    ]
    low, high = _quartiles(means)
    lengths = sorted(record.tokens for record in results)
    staleness = event.staleness
    waited_for = event.waited_for
    return _row(
        StepRow,
        fact,
        control_offset=event.offset,
        free_ns=batch.free_ns or None,
        taken_ns=batch.taken_ns,
        committed_ns=fact.at_ns,
        seconds=event.seconds,
        stopped_s=event.stopped_s,
        waited_s=event.waited_s,
        early_s=sum(fact.early_s),
        waited_for=None if waited_for is None else waited_for.trajectory,
        waited_worker=None if waited_for is None else waited_for.worker,
        waited_version=None if waited_for is None else waited_for.version,
        batch_reason=batch.take.reason,
        groups=len(fact.groups),
        trajectories=len(results),
        valid=len(rewards),
        reward=mean(rewards) if results else fact.metrics.get("reward_mean"),
        reward_raw=sum(rewards) / len(results) if results else None,
        reward_low=low,
        reward_high=high,
        tokens=sum(lengths),
        tokens_p10=_decile(lengths, 1),
        tokens_p50=_decile(lengths, 5),
        tokens_p90=_decile(lengths, 9),
        tokens_max=_decile(lengths, 10),
        staleness_min=min(staleness, default=0),
        staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
        staleness_max=max(staleness, default=0),
        bound=max((group.deadline - group.version for group in fact.groups), default=0),
        over_bound=event.over_bound,
        loss=fact.metrics.get("loss"),
        grad_norm=fact.metrics.get("grad_norm"),
        reward_parts=_json(parts_by_task(event.groups)),
        metrics=canonical(fact.metrics).decode(),
        settings=canonical(fact.settings).decode(),
        contributions=fact.contributions.sha256,
    )


def _rows_of_group(ended: GroupEnded) -> Iterator[Row]:
    group, spec = ended.group, ended.group.spec
    results, rewards = group.results, group.rewards
    trained = ended.outcome == "trained"
    yield _row(
        GroupRow,
        spec,
        group_id=spec.group,
        row=spec.index,
        round=group.round,
        dispatch_reason=group.reason,
        dispatched_ns=group.dispatched_ns,
        complete_ns=max(record.at_ns for record in results) if group.whole else None,
        taken_ns=None if ended.batch is None else ended.batch.taken_ns_of(spec.group),
        ended_ns=None if ended.outcome == "open" else ended.ended_ns,
        outcome=ended.outcome,
        end_reason=ended.why,
        step=ended.step,
        part=None if ended.batch is None else ended.batch.part_of.get(spec.group),
        staleness=staleness_of(ended.step, spec.version)
        if trained and ended.step is not None
        else None,
        results=len(results),
        valid=len(rewards),
        reward=mean(rewards),
        tokens=sum(record.tokens for record in results),
    )
    for sample in range(spec.samples):
        request = group.requests[trajectory_id(spec.group, sample)]
        yield _trajectory_row(group, sample, request)
        for attempt in request.attempts:
            yield _attempt_row(request.trajectory, attempt)


def _trajectory_row(group: GroupHistory, sample: int, request: RequestHistory) -> TrajectoryRow:
    logged, attempts = request.logged, request.attempts
    present = attempts[-1] if attempts else None
    return _row(
        TrajectoryRow,
        logged,
        trajectory_id=request.trajectory,
        group_id=group.spec.group,
        sample=sample,
        outcome=request.left,
        attempts=len(attempts),
        scheduled_ns=attempts[0].scheduled_ns if attempts else None,
        worker=None if present is None else present.worker,
        incarnation=None if present is None else present.incarnation,
        attempt=None if present is None else present.attempt,
        logged_ns=None if logged is None else logged.at_ns,
        record_offset=None if logged is None else logged.offset,
        group_parts=parts_of(group, request.trajectory),
        error_class=None if logged is None else error_class(logged.error) or None,
        error=None if logged is None else logged.error or None,
        reward_answer=None if logged is None else logged.answer or None,
        reward_parts=None if logged is None else _json(logged.parts),
    )


def _attempt_row(name: str, attempt: Attempt) -> AttemptRow:
    return _row(
        AttemptRow,
        attempt,
        trajectory_id=name,
        ended_ns=attempt.ended_ns or None,
        outcome=attempt.outcome or None,
        resumed_tokens=attempt.resumed,
        schedule_reason=attempt.reason or None,
        end_reason=attempt.why or None,
        migration_ns=attempt.migration_ns or None,
        migration_target=attempt.migration_target or None,
        migration_reason=attempt.migration_reason or None,
    )


def _json(values: Mapping[str, Any]) -> str | None:
    return msgspec.json.encode(values).decode() if values else None


def _decile(ordered: list[int], tenths: int) -> int | None:
    return ordered[-(-tenths * len(ordered) // 10) - 1] if ordered else None


def _quartiles(values: list[float]) -> tuple[float | None, float | None]:
    if not values:
        return None, None
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high
