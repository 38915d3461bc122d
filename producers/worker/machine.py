"""State machine of a rollout worker, without IO.

It reads the decisions topic from a position before it joined. Before loading its target version, it
finishes requests of the served one.

A drained worker finishes its requests, then publishes `worker left`. A stopped worker writes last
progress records and reports the progress in `worker left`. A fenced worker drops everything and
publishes nothing more under its incarnation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Literal

import msgspec

from dora_pipe.core.pure.machine import (
    BUS_TURN_NS,
    CaughtUp,
    HeldBack,
    LoopEvent,
    Now,
    Outputs,
    Publish,
    Published,
    StopAsked,
)
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.core.pure.status_schedule import Address, StatusSchedule
from dora_pipe.core.pure.wait_tracker import PendingWait, WaitTracker
from dora_pipe.producers.engines.engine import PromptTokens, WeightsLoaded
from dora_pipe.producers.tasks.calls import GroupRewarded, TaskFailed
from dora_pipe.producers.worker.effects import (
    DropWeights,
    EngineFailed,
    GroupFetched,
    LoadFailed,
    LoadWeights,
    Sleep,
    WorkerEffect,
    WorkerEvent,
)
from dora_pipe.producers.worker.episodes import Episodes
from dora_pipe.producers.worker.request import (
    ANY_VERSION,
    NOTHING,
    WAITING_PHASES,
    Phase,
    Served,
    WorkerSetup,
    pin_of,
)
from dora_pipe.producers.worker.request_table import PROGRESS_TAG
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.scoring import Scorings
from dora_pipe.producers.worker.sessions import Sessions
from dora_pipe.producers.worker.status import ProgressDelta, Situation, waits
from dora_pipe.producers.worker.transitions import Transitions
from dora_pipe.schemas.control import RUN_STOPPED, WorkerLeft, WorkerReady
from dora_pipe.schemas.metrics import Cost, FailingServer, WorkerStatus
from dora_pipe.schemas.rounds import (
    Assign,
    Cancel,
    Decision,
    Drain,
    Fence,
    IncarnationGuard,
    Migrate,
    Schedule,
    ScheduledRequest,
    ScoreGroup,
    StopRun,
)
from dora_pipe.schemas.wire import encode
from dora_pipe.store.transfers.transfers import weights_url

WorkerOutcome = Literal["running", "left", "fenced", "replaced", "failed"]
"""`replaced`: a decision names a later incarnation of this worker."""

CALLS_REPORTED_MAX: Final = 8

PROGRESS_STATUS_NS: Final = BUS_TURN_NS
"""Least interval between statuses after progress records; a lost request resumes from the last
status."""


class LoadedVersions:
    """Loaded versions of a worker that hosts several; otherwise empty."""

    def __init__(self, most: int) -> None:
        self.several = most > 1
        self._digests: dict[int, str] = {}

    @property
    def versions(self) -> list[int]:
        return sorted(self._digests)

    def has(self, version: int, digest: str) -> bool:
        return self._digests.get(version) == digest

    def add(self, served: Served) -> None:
        self._digests[served.version] = served.digest

    def drop(self, versions: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            version for version in versions if self._digests.pop(version, None) is not None
        )


class WorkerMachine:
    """Incarnation of a rollout worker; `outcome` and `error` report its end."""

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        cost: Callable[[], Cost],
        kv_used: Callable[[], int],
        prompt_tokens: Callable[[], PromptTokens] = PromptTokens,
        failing: Callable[[], tuple[FailingServer, ...]] = tuple,
        codec: AbstractContextManager[object] | None = None,
    ) -> None:
        self.setup = setup
        self.requests = Requests(setup, codec or nullcontext())
        self.scorings = Scorings(self.requests)
        self.sessions = Sessions(self.requests)
        self.transitions = Transitions(self.requests, Episodes(self.requests), self.sessions)
        self.served = NOTHING
        self.target = NOTHING
        self.loading: Served | None = None
        self.loaded = LoadedVersions(setup.max_resident_versions)
        self.outcome: WorkerOutcome = "running"
        self.error = ""
        self.error_is_local = False
        self.error_hint: str | None = None
        self.fenced_for = ""
        self.run_over = False
        self._cost = cost
        self._kv_used = kv_used
        self._prompt_tokens = prompt_tokens
        self._failing = failing
        self._draining = ""
        self._leaving = ""
        self._leave_by_ns = 0
        self._schedule = StatusSchedule(heartbeat_ns=setup.heartbeat_ns, quiet_ns=setup.quiet_ns)
        self._delta = ProgressDelta()
        self._waits = WaitTracker(setup.worker, setup.limits)
        self._loading_ns = 0
        self._tokens = (0, 0)  # count, and time of the last change or of no running request
        self._guard = IncarnationGuard()

    @property
    def finished(self) -> bool:
        return self.outcome != "running"

    def positions(self) -> Mapping[TopicPartition, int]:
        decisions = TopicPartition(self.setup.topics.decisions, 0)
        return {decisions: self.setup.decisions_from}

    def wake_at(self) -> int:
        due_ns = self._schedule.due_ns
        return min(due_ns, self._leave_by_ns) if self._leaving else due_ns

    def react(self, inputs: Sequence[LoopEvent | WorkerEvent], now: Now) -> Outputs[WorkerEffect]:
        out = self.requests.begin_turn(now)
        for event in inputs:
            if not self.finished:
                self._handle(event, now)
        if not self.finished:
            self._act(now)
        if self.outcome in ("fenced", "replaced"):
            self.requests.drop_all()
            return Outputs()
        return out

    def waits(self, now_ns: int) -> list[PendingWait]:
        situation = Situation(
            served=self.served.version,
            loading=self.loading.version if self.loading else None,
            loading_ns=self._loading_ns,
            tokens_ns=self._tokens[1],
            now_ns=now_ns,
            heartbeat_ns=self.setup.heartbeat_ns,
        )
        waiting = waits(self.requests.by_key.values(), situation)
        scoring = self.scorings.wait(now_ns, self.setup.heartbeat_ns)
        return waiting if scoring is None else [*waiting, scoring]

    # Inputs

    def _handle(self, event: LoopEvent | WorkerEvent, now: Now) -> None:
        name = self.setup.worker
        match event:
            case Record():
                self._on_record(event, now)
            case Published():
                self._on_published(event, now)
            case WeightsLoaded():
                self._on_loaded(event, now)
            case LoadFailed():
                self.error_hint = event.hint
                error = f"worker {name} cannot host version {event.version}: {event.message}"
                self._fail(error, event.local, now)
            case EngineFailed():
                self._fail(f"the engine of worker {name} failed: {event.message}", True, now)
            case StopAsked():
                self._leave("its process was asked to stop", now)
            case CaughtUp() | HeldBack():
                pass  # decisions about this worker come after it joined; late ones are obeyed
            case GroupFetched() | GroupRewarded() | TaskFailed() if event.request in self.scorings:
                self.scorings.handle(event, now)
            case _:
                self.transitions.handle(event, now)

    def _on_record(self, record: Record, now: Now) -> None:
        """Raises SchemaError or InvariantBroken, since no decision may be skipped."""
        round_ = self._guard.read(record.offset, record.value)
        if round_ is None:
            self.requests.counts["rounds of an older orchestrator"] += 1
            return
        for decision in round_.decisions:
            if not self.finished:
                self._obey(decision, now)

    def _on_published(self, event: Published, now: Now) -> None:
        self.transitions.handle(event, now)
        if event.tag.startswith(PROGRESS_TAG):
            self._schedule.bring_forward(PROGRESS_STATUS_NS)

    def _on_loaded(self, event: WeightsLoaded, now: Now) -> None:
        if self.loading is None or event.version != self.loading.version:
            self.requests.counts["refused"] += 1
            return
        self.served, self.loading = self.loading, None
        if self.loaded.several:
            self.loaded.add(self.served)
        else:
            self.requests.weights_replaced(self.served, now)
        self._ready(event.load_ms, now)

    def _fail(self, error: str, local: bool, now: Now) -> None:
        self.loading, self.error, self.error_is_local = None, error, local
        self._leave(error, now)

    # Decisions

    def _obey(self, decision: Decision, now: Now) -> None:
        match decision:
            case Schedule():
                self._on_schedule(decision, now)
            case Cancel() if self._mine(decision):
                self.requests.cancel(decision.trajectory, decision.attempt)
            case Migrate() if self._mine(decision):
                self.requests.move(decision.trajectory, decision.attempt, now)
            case ScoreGroup() if self._mine(decision):
                if not (self._leaving or self._draining):
                    self.scorings.ask(decision, now)
            case Assign() if self._mine(decision):
                self._on_assign(decision, now)
            case Drain() if self._mine(decision):
                self._draining = self._draining or f"drained: {decision.reason}"
            case Fence() if self._mine(decision):
                self.outcome, self.fenced_for = "fenced", decision.reason
            case StopRun():
                self.run_over = True
                self._leaving = self._leaving or f"{RUN_STOPPED}: {decision.reason}"
                self._end(now)

    def _mine(
        self, decision: Assign | Cancel | Drain | Fence | Migrate | Schedule | ScoreGroup
    ) -> bool:
        """Whether a decision names this incarnation; a later incarnation replaces it."""
        if decision.worker != self.setup.worker:
            return False
        if decision.incarnation > self.setup.incarnation:
            self.outcome = "replaced"
        elif decision.incarnation < self.setup.incarnation:
            self.requests.counts["decisions for an earlier incarnation"] += 1
        return decision.incarnation == self.setup.incarnation

    def _on_schedule(self, schedule: Schedule, now: Now) -> None:
        if schedule.worker != self.setup.worker:
            return
        mine = self._mine(schedule)
        if self.finished or (mine and (self._leaving or self._draining)):
            return  # `worker left` hands back all requests
        for request in schedule.requests():
            refusal = self._refusal(request)
            if refusal is None:
                taker = self.sessions if self.sessions.takes(request) else self.requests
                taker.place(request, now)
            else:
                error, message, retryable = refusal
                self.requests.fail(request, now, error, message, retryable=retryable)

    def _refusal(self, request: ScheduledRequest) -> tuple[str, str, bool] | None:
        """Return (error, message, retryable) if the request cannot be taken."""
        setup, spec = self.setup, request.spec
        where = f"{request.trajectory} was placed on worker {setup.worker}"
        if request.incarnation != setup.incarnation:
            ended = f"incarnation {request.incarnation}, which ended"
            why = f"{where} under {ended}: this is {setup.incarnation}"
            return "EarlierIncarnation", why, True
        mine = setup.digests.get(spec.source, "none")
        if spec.dataset_digest != mine:
            why = f"{where} with data set {spec.dataset_digest[:12]}, which has {mine[:12]}"
            return "OtherDataset", why, False
        mixes = pin_of(request, setup) == ANY_VERSION and spec.version < self.target.version
        has = self.loaded.has(spec.version, spec.digest)
        if not (mixes or has) and Served(spec.version, spec.digest) != self.target:
            why = f"{where} under version {spec.version} ({spec.digest[:12]}), "
            why += f"whose target is {self.target.version} ({self.target.digest[:12]})"
            return "OtherVersion", why, True
        if self.requests.placed >= setup.requests_max:
            return "TooMany", f"{where}, which holds {setup.requests_max} requests already", True
        return None

    def _on_assign(self, assign: Assign, now: Now) -> None:
        if self._leaving or self._draining:
            return
        self.target = Served(assign.version, assign.digest)
        dropped = self.loaded.drop(assign.drop)
        self.requests.hold_versions(now, *self._versions())
        if dropped:
            self.requests.ask(DropWeights(versions=dropped))
        if self.loaded.has(assign.version, assign.digest):
            self.served = self.target
        if self.target == self.served and self.loading is None:
            self._ready(0.0, now)

    # Next actions

    def _act(self, now: Now) -> None:
        requests = self.requests
        requests.report(now)
        requests.write_progress()
        late = self._leaving and now.mono_ns >= self._leave_by_ns
        idle = requests.idle and (self._leaving or not self.scorings)
        if late or ((self._leaving or self._draining) and idle):
            self._end(now)
            return
        if self.loading is None and not self._leaving:
            if self.loaded.several:
                requests.fill(*self.loaded.versions)
                busy = self.served == self.target
            else:
                busy = self.served == self.target or requests.generating(self.served.version) > 0
                if busy:
                    requests.fill(self.served.version)
            if not busy:
                self._load(now)
        if now.mono_ns >= self._schedule.due_ns:
            self._status(now)

    def _off_engine_now(self, now: Now) -> int:
        """Counting starts at the first token, after task processes have started."""
        if not self.requests.tokens_total:
            self.requests.off_engine.begin(now.mono_ns)
        return self.requests.off_engine.mean(now.mono_ns, self.requests.placed)

    def _versions(self) -> list[int]:
        loaded = self.loaded.versions if self.loaded.several else [self.served.version]
        return [*loaded, self.target.version]

    def _load(self, now: Now) -> None:
        self.loading, self._loading_ns = self.target, now.mono_ns
        if self.target == NOTHING:
            self.requests.ask(Sleep())
            return
        effect = LoadWeights(
            version=self.target.version,
            digest=self.target.digest,
            keep=self.setup.partial_rollout,
        )
        self.requests.ask(effect)

    def _ready(self, load_ms: float, now: Now) -> None:
        """Publish `worker ready`; the served version may differ from a target replaced during
        loading."""
        served = self.served
        self.requests.hold_versions(now, *self._versions())
        record = WorkerReady(
            at_ns=now.wall_ns,
            worker=self.setup.worker,
            incarnation=self.setup.incarnation,
            version=served.version,
            digest=served.digest,
            load_ms=load_ms,
        )
        self._publish(self.setup.topics.control, record)

    def _leave(self, reason: str, now: Now) -> None:
        if self._leaving:
            return
        self._leaving = reason
        self._leave_by_ns = now.mono_ns + self.setup.stop_timeout_ns
        self.requests.leave()

    def _end(self, now: Now) -> None:
        requests = self.requests
        record = WorkerLeft(
            at_ns=now.wall_ns,
            worker=self.setup.worker,
            incarnation=self.setup.incarnation,
            reason=self._leaving or self._draining,
            progress={**requests.abandoned_progress, **requests.progress()},
        )
        self._publish(self.setup.topics.control, record)
        self.outcome = "failed" if self.error else "left"
        self.scorings.drop_all()
        requests.drop_all()

    def _status(self, now: Now) -> None:
        requests, setup = self.requests, self.setup
        if requests.tokens_total != self._tokens[0] or not requests.in_phase(Phase.RUNNING):
            self._tokens = (requests.tokens_total, now.mono_ns)
        waiting, prompts = self.waits(now.mono_ns), self._prompt_tokens()
        calls = requests.unanswered_calls(CALLS_REPORTED_MAX)
        status = WorkerStatus(
            at_ns=now.wall_ns,
            waits=self._waits.update(waiting, mono_ns=now.mono_ns, wall_ns=now.wall_ns),
            cost=self._cost(),
            worker=setup.worker,
            incarnation=setup.incarnation,
            version=self.served.version,
            active=requests.in_phase(Phase.RUNNING),
            waiting=requests.in_phase(*WAITING_PHASES),
            kv_used_tokens=self._kv_used(),
            tokens_total=requests.tokens_total,
            progress=requests.progress(),
            weights_at=weights_url(setup.transfers, self.served.digest),
            off_engine=self._off_engine_now(now),
            in_environment=requests.in_phase(Phase.ENVIRONMENT),
            being_scored=requests.in_phase(Phase.REWARDING),
            with_agent=requests.thinking_sessions,
            calls_open=calls.count,
            call_since_ns=calls.oldest[0].since_ns if calls.oldest else 0,
            calls_oldest=calls.oldest,
            calls_before=calls.before,
            prompt_tokens_computed=prompts.computed,
            prompt_tokens_reused=prompts.reused,
            failing=self._failing(),
        )
        to = Address(setup.topics.metrics, setup.worker.encode())
        requests.out.publish += self._schedule.publish(status, to, now.mono_ns, self._delta.shorten)

    def _publish(self, topic: str, record: msgspec.Struct) -> None:
        append = Append(topic=topic, key=self.setup.worker.encode(), value=encode(record))
        self.requests.out.publish.append(Publish(record=append))
