"""The rollout worker without IO: obeys decisions meant for its own incarnation, and checks them.

It reads the decisions topic and nothing else, from a position taken before it joined: whatever was
decided about this incarnation lies behind it. It hosts one version and has a target. While the two
differ, requests of the hosted version that it already has are finished (a decision may take them
away), then the target is loaded; requests of the target wait for it. Any other version is refused.

Three ways out. Drained: nothing more is taken, what is here is finished, then `worker left`. Asked
to stop: running requests get a last progress record, finished ones are still logged, then
`worker left` says how far each had come. Fenced: everything is dropped, nothing is published any
more under this epoch, the loop ends; the role joins again under a new epoch, if nobody else has
taken its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec

from dora_pipe.bus.port import Append, Record, TopicPartition
from dora_pipe.core.runtime import (
    BUS_TURN_NS,
    CaughtUp,
    HeldBack,
    Now,
    Outputs,
    Publish,
    Published,
    StopAsked,
)
from dora_pipe.core.status_schedule import Address, StatusSchedule
from dora_pipe.core.wait_tracker import PendingWait, WaitTracker
from dora_pipe.producers.engines.port import PromptTokens, WeightsLoaded
from dora_pipe.producers.worker.effects import (
    DropWeights,
    EngineFailed,
    LoadFailed,
    LoadWeights,
    Sleep,
)
from dora_pipe.producers.worker.episodes import TOLD_AGAIN, Episodes
from dora_pipe.producers.worker.off_engine import NEVER_NS
from dora_pipe.producers.worker.progress import PROGRESS_TAG
from dora_pipe.producers.worker.request import (
    ANY_VERSION,
    NOTHING,
    STARTED_AGAIN,
    WAITING_PHASES,
    Hosted,
    Phase,
    WorkerSetup,
    pin_of,
)
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.scoring import Scorings
from dora_pipe.producers.worker.sessions import Sessions
from dora_pipe.producers.worker.status import ProgressDelta, Situation, waits
from dora_pipe.schemas.control import RUN_STOPPED, WorkerLeft, WorkerReady
from dora_pipe.schemas.metrics import Cost, FailingPlace, WorkerStatus
from dora_pipe.schemas.policy import Fallback
from dora_pipe.schemas.rounds import (
    Assign,
    Cancel,
    Decision,
    Drain,
    EpochGuard,
    Fence,
    Move,
    Place,
    PlacedRequest,
    ScoreGroup,
    StopRun,
)
from dora_pipe.schemas.wire import encode
from dora_pipe.store.transfers.port import weights_url

Outcome = Literal["running", "left", "fenced", "replaced", "failed"]
"""`replaced`: a decision names a later incarnation of this worker's name."""

CALLS_SAID_MAX: Final = 8
"""Open calls that a status names, the oldest ones."""

PROGRESS_STATUS_NS: Final = BUS_TURN_NS
"""A status follows an acknowledged progress record at once, but so long after the last one, and
when that one is paid for (`StatusSchedule`): what it names is what a lost request goes on from."""


OFF_ENGINE_NEWS_SHARE: Final = 8
"""So does one when so small a share of the slots more, or less, is needed than the orchestrator
knows. It does not wait to be paid for: there are no more of them than requests allow."""


class LoadedVersions:
    """The versions of a worker that hosts several at once; with one at a time, never any.

    The orchestrator decides which those are. Every request runs under its own, and goes on under it
    while another one is loaded.
    """

    def __init__(self, most: int) -> None:
        self.several = most > 1
        self._digests: dict[int, str] = {}

    @property
    def versions(self) -> list[int]:
        """Those that requests may run under, ascending."""
        return sorted(self._digests)

    def has(self, version: int, digest: str) -> bool:
        return self._digests.get(version) == digest

    def add(self, hosted: Hosted) -> None:
        self._digests[hosted.version] = hosted.digest

    def drop(self, versions: tuple[int, ...]) -> tuple[int, ...]:
        """Forget versions; answers with those that were here."""
        return tuple(one for one in versions if self._digests.pop(one, None) is not None)


class WorkerMachine:
    """One incarnation of a rollout worker.

    Example: ``Runtime(WorkerMachine(setup, cost=meter.cost, kv_used=...), ...).run(stop)``;
    afterwards `outcome` and `error` say how it ended.
    """

    def __init__(
        self,
        setup: WorkerSetup,
        *,
        cost: Callable[[], Cost],
        kv_used: Callable[[], int],
        prompt_tokens: Callable[[], PromptTokens] = PromptTokens,
        failing: Callable[[], tuple[FailingPlace, ...]] = tuple,
    ) -> None:
        self.setup = setup
        self.requests = Requests(setup)
        self.scorings = Scorings(self.requests)
        self.sessions = Sessions(self.requests)
        self.episodes = Episodes(self.requests)
        self.hosted = NOTHING
        self.target = NOTHING
        self.loading: Hosted | None = None
        self.loaded = LoadedVersions(setup.versions_resident)
        self.outcome: Outcome = "running"
        self.error = ""
        self.error_here = False
        """What went wrong is of this process or machine; see `LoadFailed`."""
        self.error_hint: str | None = None
        self.fenced_for = ""
        """Why the orchestrator has fenced it."""
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
        self._tokens = (0, 0)  # how many, and when there were fewer, or nothing to sample
        self._off_engine = (0, 0)  # requests that need no slot, and those that had ended, as said
        self._off_engine_due_ns = NEVER_NS
        self._guard = EpochGuard()

    @property
    def finished(self) -> bool:
        """Whether this incarnation is over."""
        return self.outcome != "running"

    def positions(self) -> Mapping[TopicPartition, int]:
        """The decisions, from before this incarnation joined."""
        decisions = TopicPartition(self.setup.topics.decisions, 0)
        return {decisions: self.setup.decisions_from}

    def wake_at(self) -> int:
        """When the next status is due, or what is known of who needs no slot is not so any more; or
        the end of patience while leaving."""
        due_ns = min(self._schedule.due_ns, self._off_engine_due_ns)
        return min(due_ns, self._leave_by_ns) if self._leaving else due_ns

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs:
        """Take the inputs in order, then start whatever has become possible."""
        out = self.requests.begin_turn(now.mono_ns)
        for one in inputs:
            if not self.finished:
                self._handle(one, now)
        if not self.finished:
            self._go_on(now)
        if self.outcome in ("fenced", "replaced"):
            self.requests.drop_all()
            return Outputs()
        return out

    def waits(self, now_ns: int) -> list[PendingWait]:
        """What it waits for at this monotonic time."""
        at = Situation(
            hosted=self.hosted.version,
            loading=self.loading.version if self.loading else None,
            loading_ns=self._loading_ns,
            tokens_ns=self._tokens[1],
            now_ns=now_ns,
            heartbeat_ns=self.setup.heartbeat_ns,
        )
        found = waits(self.requests.by_key.values(), at)
        scoring = self.scorings.wait(now_ns, self.setup.heartbeat_ns)
        return found if scoring is None else [*found, scoring]

    # Inputs

    def _handle(self, one: Any, now: Now) -> None:
        match one:
            case Record():
                self._on_record(one, now)
            case Published():
                self._on_published(one, now)
            case WeightsLoaded():
                self._on_loaded(one, now)
            case LoadFailed():
                what = f"worker {self.setup.worker} cannot host version {one.version}"
                self.error_hint = one.hint
                self._fail(f"{what}: {one.message}", one.here, now)
            case EngineFailed():
                what = f"the engine of worker {self.setup.worker} failed"
                self._fail(f"{what}: {one.message}", True, now)
            case StopAsked():
                self._leave("its process was asked to stop", now)
            case CaughtUp() | HeldBack():
                pass  # what concerns it was decided after it joined; what comes late is obeyed late
            case _:
                apart = (self.scorings, self.sessions, self.episodes)
                if not any(some.handle(one, now) for some in apart):
                    self.requests.handle(one, now)

    def _on_record(self, record: Record, now: Now) -> None:
        """A round. Raises SchemaError, InvariantBroken: what was decided must not be skipped."""
        round_ = self._guard.read(record.offset, record.value)
        if round_ is None:
            self.requests.counts["rounds of an older orchestrator"] += 1
            return
        for decision in round_.decisions:
            if not self.finished:
                self._obey(decision, now)

    def _on_published(self, event: Published, now: Now) -> None:
        apart = (self.sessions, self.episodes)
        if not any(some.handle_published(event, now) for some in apart):
            self.requests.handle_published(event, now)
        if event.tag.startswith(PROGRESS_TAG):
            self._schedule.bring_forward(PROGRESS_STATUS_NS)

    def _on_loaded(self, event: WeightsLoaded, now: Now) -> None:
        if self.loading is None or event.version != self.loading.version:
            self.requests.counts["refused"] += 1
            return
        self.hosted, self.loading = self.loading, None
        if self.loaded.several:
            self.loaded.add(self.hosted)
        else:
            self.requests.weights_replaced(self.hosted, now)
        self._ready(event.load_ms, now, event.fallbacks)

    def _fail(self, error: str, here: bool, now: Now) -> None:
        self.loading, self.error, self.error_here = None, error, here
        self._leave(error, now)

    # Decisions

    def _obey(self, decision: Decision, now: Now) -> None:
        """Do what a decision says; those of other types are somebody else's."""
        match decision:
            case Place():
                self._on_place(decision, now)
            case Cancel() if self._mine(decision):
                self.requests.cancel(decision.trajectory, decision.attempt)
            case Move() if self._mine(decision):
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
                self._left(now)

    def _mine(self, decision: Assign | Cancel | Drain | Fence | Move | Place | ScoreGroup) -> bool:
        """Whether it is meant for this incarnation; a later one means that this is replaced."""
        if decision.worker != self.setup.worker:
            return False
        if decision.epoch > self.setup.epoch:
            self.outcome = "replaced"
        elif decision.epoch < self.setup.epoch:
            self.requests.counts["decisions for an earlier epoch"] += 1
        return decision.epoch == self.setup.epoch

    def _on_place(self, place: Place, now: Now) -> None:
        if place.worker != self.setup.worker:
            return
        mine = self._mine(place)
        if self.finished or (mine and (self._leaving or self._draining)):
            return  # `worker left` hands them back, with all others
        for request in place.requests():
            refusal = self._refusal(request)
            if refusal is None:
                taker = self.sessions if self.sessions.takes(request) else self.requests
                taker.place(request, now)
            else:
                error, message, retryable = refusal
                self.requests.fail(request, now, error, message, retryable=retryable)

    def _refusal(self, place: PlacedRequest) -> tuple[str, str, bool] | None:
        """(error, message, retryable) of what cannot be taken."""
        setup, spec = self.setup, place.spec
        where = f"{place.trajectory} was placed on worker {setup.worker}"
        if place.epoch != setup.epoch:
            why = f"{where} under role epoch {place.epoch}, which ended: this is {setup.epoch}"
            return "EarlierEpoch", why, True
        mine = setup.digests.get(spec.source, "none")
        if spec.dataset_digest != mine:
            why = f"{where} with data set {spec.dataset_digest[:12]}, which has {mine[:12]}"
            return "OtherDataset", why, False
        mixes = pin_of(place, setup) == ANY_VERSION and spec.version < self.target.version
        has = self.loaded.has(spec.version, spec.digest)
        if not (mixes or has) and Hosted(spec.version, spec.digest) != self.target:
            why = f"{where} under version {spec.version} ({spec.digest[:12]}), "
            why += f"whose target is {self.target.version} ({self.target.digest[:12]})"
            return "OtherVersion", why, True
        if self.requests.placed >= setup.requests_max:
            return "TooMany", f"{where}, which holds {setup.requests_max} requests already", True
        return None

    def _on_assign(self, assign: Assign, now: Now) -> None:
        if self._leaving or self._draining:
            return
        self.target = Hosted(assign.version, assign.digest)
        dropped = self.loaded.drop(assign.drop)
        self.requests.hold_versions(now, *self._versions())
        if dropped:
            self.requests.ask(DropWeights(versions=dropped))
        if self.loaded.has(assign.version, assign.digest):
            self.hosted = self.target
        if self.target == self.hosted and self.loading is None:
            self._ready(0.0, now)

    # What follows

    def _go_on(self, now: Now) -> None:
        requests = self.requests
        requests.report(now)
        requests.write_progress()
        late = self._leaving and now.mono_ns >= self._leave_by_ns
        idle = requests.idle and (self._leaving or not self.scorings)
        if late or ((self._leaving or self._draining) and idle):
            self._left(now)
            return
        if self.loading is None and not self._leaving:
            if self.loaded.several:
                requests.fill(*self.loaded.versions)
                busy = self.hosted == self.target
            else:
                busy = self.hosted == self.target or requests.generating(self.hosted.version) > 0
                if busy:
                    requests.fill(self.hosted.version)
            if not busy:
                self._load(now)
        self._hurry_status(now)
        if now.mono_ns >= self._schedule.due_ns:
            self._status(now)
        self._off_engine_due_ns = self._off_engine_news_ns()

    def _hurry_status(self, now: Now) -> None:
        """How many requests need no slot is news when it is another number than is known."""
        known, least = self._known_off_engine()
        if abs(self._off_engine_now(now) - known) >= least:
            self._schedule.bring_forward(BUS_TURN_NS, unpaid=True)

    def _off_engine_news_ns(self) -> int:
        """When it will be, if nothing changes."""
        known, least = self._known_off_engine()
        reaches_ns = self.requests.off_engine.reaches_ns
        if not self.requests.tokens_total:
            return NEVER_NS
        return min(reaches_ns(known + least), reaches_ns(known - least))

    def _known_off_engine(self) -> tuple[int, int]:
        """What was said, as the fold counts it down; and the difference that is news."""
        said, ended = self._off_engine
        known = max(0, said - (self.requests.ended - ended))
        return known, max(1, self.setup.slots // OFF_ENGINE_NEWS_SHARE)

    def _off_engine_now(self, now: Now) -> int:
        """Before its first token, a worker's task processes are still starting: nothing counts."""
        if not self.requests.tokens_total:
            self.requests.off_engine.begin(now.mono_ns)
        return self.requests.off_engine.mean(now.mono_ns, self.requests.placed)

    def _versions(self) -> list[int]:
        """Those that requests may wait for here."""
        others = self.loaded.versions if self.loaded.several else [self.hosted.version]
        return [*others, self.target.version]

    def _load(self, now: Now) -> None:
        self.loading, self._loading_ns = self.target, now.mono_ns
        if self.target == NOTHING:
            self.requests.ask(Sleep())
            return
        effect = LoadWeights(
            version=self.target.version,
            digest=self.target.digest,
            keep=self.setup.interruptible,
        )
        self.requests.ask(effect)

    def _ready(self, load_ms: float, now: Now, fallbacks: tuple[Fallback, ...] = ()) -> None:
        """The hosted version may be the target, or one that was replaced while it was loaded."""
        hosted = self.hosted
        self.requests.hold_versions(now, *self._versions())
        record = WorkerReady(
            at_ns=now.wall_ns,
            worker=self.setup.worker,
            epoch=self.setup.epoch,
            version=hosted.version,
            digest=hosted.digest,
            load_ms=load_ms,
            fallbacks=fallbacks,
        )
        self._publish(self.setup.topics.control, record)

    def _leave(self, reason: str, now: Now) -> None:
        if self._leaving:
            return
        self._leaving = reason
        self._leave_by_ns = now.mono_ns + self.setup.stop_timeout_ns
        self.requests.leave()

    def _left(self, now: Now) -> None:
        requests = self.requests
        record = WorkerLeft(
            at_ns=now.wall_ns,
            worker=self.setup.worker,
            epoch=self.setup.epoch,
            reason=self._leaving or self._draining,
            progress={**requests.left, **requests.progress()},
        )
        self._publish(self.setup.topics.control, record)
        self.outcome = "failed" if self.error else "left"
        self.scorings.drop_all()
        requests.drop_all()

    def _status(self, now: Now) -> None:
        requests, setup = self.requests, self.setup
        if requests.tokens_total != self._tokens[0] or not requests.in_phase(Phase.RUNNING):
            self._tokens = (requests.tokens_total, now.mono_ns)
        found, prompts = self.waits(now.mono_ns), self._prompt_tokens()
        calls = requests.asked_calls(CALLS_SAID_MAX)
        status = WorkerStatus(
            at_ns=now.wall_ns,
            waits=self._waits.update(found, mono_ns=now.mono_ns, wall_ns=now.wall_ns),
            cost=self._cost(),
            worker=setup.worker,
            epoch=setup.epoch,
            version=self.hosted.version,
            active=requests.in_phase(Phase.RUNNING),
            waiting=requests.in_phase(*WAITING_PHASES),
            kv_used_tokens=self._kv_used(),
            tokens_total=requests.tokens_total,
            progress=requests.progress(),
            weights_at=weights_url(setup.transfers, self.hosted.digest),
            off_engine=self._off_engine_now(now),
            in_environment=requests.in_phase(Phase.ENVIRONMENT),
            being_scored=requests.in_phase(Phase.REWARDING),
            with_agent=requests.thinking,
            calls_open=calls.count,
            call_since_ns=calls.oldest[0].since_ns if calls.oldest else 0,
            calls_oldest=calls.oldest,
            calls_before=calls.before,
            prompt_tokens_computed=prompts.computed,
            prompt_tokens_reused=prompts.reused,
            failing=self._failing(),
            episodes_started_again=requests.counts[STARTED_AGAIN],
            episodes_told_again=requests.counts[TOLD_AGAIN],
        )
        to = Address(setup.topics.metrics, setup.worker.encode())
        goes_out = self._schedule.publish(status, to, now.mono_ns, self._delta.shorten)
        if goes_out:
            self._off_engine = (status.off_engine, requests.ended)
        requests.out.publish += goes_out

    def _publish(self, topic: str, record: msgspec.Struct) -> None:
        append = Append(topic=topic, key=self.setup.worker.encode(), value=encode(record))
        self.requests.out.publish.append(Publish(record=append))
