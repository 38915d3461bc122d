"""Orchestrator without IO: records and time go in, rounds come out.

A turn applies what was read, observes, plans, and writes a round if anything changed. It observes
and plans only after the log has been read. After many bytes, the plan waits for the next turn
(`planned: false`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final, assert_never

import msgspec

from dora_pipe.config.model import Timing
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.machine import (
    CaughtUp,
    HeldBack,
    LoopEvent,
    Now,
    Outputs,
    Publish,
    Published,
    StopAsked,
)
from dora_pipe.core.pure.records import Append, Record, TopicPartition, dead_letter_of
from dora_pipe.core.pure.status_schedule import Address, StatusSchedule, quiet_ns
from dora_pipe.core.pure.wait_tracker import Limits, WaitTracker
from dora_pipe.orchestrator.apply_control import apply_control, read_control
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.orchestrator.entities import KV_PRESSURE, Worker
from dora_pipe.orchestrator.fold import (
    apply_observation,
    close_round,
    is_digest_due,
    rounds_to_digest,
)
from dora_pipe.orchestrator.leases import Incarnation, Leases
from dora_pipe.orchestrator.planner import decide, is_cut
from dora_pipe.orchestrator.snapshots import Body, WriteSnapshot, body_of
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.waits import admission_limit, waits
from dora_pipe.schemas.control import (
    GroupScored,
    RequestFailed,
    RequestReleased,
    Resume,
    TrajectoriesLogged,
    WorkerJoined,
    WorkerReady,
)
from dora_pipe.schemas.dead_letter import encode_dead_letter
from dora_pipe.schemas.metrics import Cost, OrchestratorStatus, WorkerStatus, decode_metrics, merged
from dora_pipe.schemas.rounds import (
    STATE_DIGEST_EVERY,
    AnyObservation,
    Dispatch,
    GroupExpired,
    KvPressure,
    LeaseExpired,
    OffEngine,
    PlanPeriod,
    Progressed,
    Round,
    fold_bytes,
    seal,
)
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)


class TrimMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: delete old metrics records; no event follows. Kafka's `retention.ms` skipped: a user
    might set it on topics that a run needs."""

    topic: str
    before_ns: int
    """By the wall clock of orchestrators."""


OrchestratorEffect = WriteSnapshot | TrimMetrics

FROM_WORKERS: Final = (WorkerReady, TrajectoriesLogged, RequestReleased, RequestFailed, GroupScored)
"""Records that renew a worker's lease."""

CONTROL_MAX: Final = 1000
"""Maximum control records per round."""

GAP_HEARTBEATS: Final = 2
"""Heartbeats between reactions that mean the orchestrator was suspended."""

PRESSURE_NS: Final = 5_000_000_000
"""Interval between observations of a full cache."""


FOLDED_BYTES_MAX: Final = 256 * 1024
"""Folded bytes above which a round does not plan."""

TRIM_EVERY_NS: Final = 3600 * 10**9
"""Interval between trims of the metrics."""

STATUS_KEY: Final = b"orchestrator"

OFF_ENGINE_SHARE: Final = 16
"""Minimum change to observe, as a share of a worker's slots."""


class OrchestratorMachine:
    """`core.pure.machine.Machine` that owns the State.

    `state` is the fold of the log; `metrics` are start positions. `snapshot_every` rounds is a
    multiple of `STATE_DIGEST_EVERY`, 0 for never. `metrics_keep_ns` 0 keeps all statuses.
    """

    def __init__(
        self,
        *,
        state: State,
        topics: Topics,
        incarnation: int,
        metrics: Mapping[TopicPartition, int],
        timing: Timing,
        cost: Callable[[], Cost],
        snapshot_every: int = 0,
        metrics_keep_ns: int = 0,
        samplers: Samplers | None = None,
    ) -> None:
        self.state = state
        self._samplers = samplers
        self._topics = topics
        self._incarnation = incarnation
        self._metrics = dict(metrics)
        self._cost = cost
        self._heartbeat_ns = int(timing.heartbeat_s * 1e9)
        self._period_ns = int(timing.plan_period_s * 1e9)
        self._lease_ns = int(timing.lease_s * 1e9)
        gap_ns = GAP_HEARTBEATS * self._heartbeat_ns
        self._leases = Leases[Incarnation](gap_ns)
        self._times = Leases[str](gap_ns)
        """Of generating groups."""
        self._statuses: dict[Incarnation, WorkerStatus] = {}
        self._pressures: dict[Incarnation, KvPressure] = {}
        self._off_engine: dict[Incarnation, OffEngine] = {}
        self._press_due_ns: dict[Incarnation, int] = {}
        limits = Limits(short_s=timing.alarm_s, work_s=timing.alarm_work_s)
        self._waits = WaitTracker("orchestrator", limits)
        self._last_progress = _progress(state)
        self._last_progress_ns: int | None = None
        self._folded: list[bytes] = []
        self._control_next = state.control_next
        self._observed: list[AnyObservation] = []
        assert snapshot_every % STATE_DIGEST_EVERY == 0
        self._snapshot_every = snapshot_every
        self._snapshot: tuple[str, Body] | None = None
        """State whose round is not durable yet."""
        self._publish: list[Publish] = []
        self._effects: list[OrchestratorEffect] = []
        self._caught_up = False
        self._held_back: list[str] = []
        """Topics with unreadable acknowledged records."""
        self._stopped = False
        self._put_off = False
        """Whether the last round left its plan to the next turn."""
        self._more = False
        self._started: Now | None = None
        self._started_ns = 0
        self._schedule = StatusSchedule(heartbeat_ns=self._heartbeat_ns, quiet_ns=quiet_ns(timing))
        self._metrics_keep_ns = metrics_keep_ns
        self._trim_due_ns = 0
        self._period_due_ns = 0

    def positions(self) -> Mapping[TopicPartition, int]:
        """Return the positions to read from."""
        return {TopicPartition(self._topics.control, 0): self._control_next, **self._metrics}

    @property
    def finished(self) -> bool:
        """Report whether the run is over, halted, or this role was stopped."""
        halted = bool(self.state.failures.halted) and self._caught_up
        return self.state.done or self._stopped or halted

    def wake_at(self) -> int:
        """Return the next due time; 0 if a plan was cut short."""
        if self._more or self._started is None:
            return 0
        dues = [self._leases.due_ns(self._lease_ns), self._times.due_ns(self._group_timeout_ns)]
        if self._caught_up:
            dues.append(self._period_due_ns)
        return min([self._schedule.due_ns, *(due for due in dues if due is not None)])

    def react(self, inputs: Sequence[LoopEvent], now: Now) -> Outputs[OrchestratorEffect]:
        """Run one turn."""
        self._publish, self._effects = [], []
        self._begin(now)
        self._leases.turn(now.mono_ns)
        self._times.turn(now.mono_ns)
        for event in inputs:
            if isinstance(event, Record):
                self._read(event, now)
            elif isinstance(event, CaughtUp):
                self._caught_up = True
                self._period_due_ns = now.mono_ns + self._period_ns
                self._trim_due_ns = now.mono_ns + TRIM_EVERY_NS
                living = [
                    (worker.name, worker.incarnation) for worker in self.state.workers.values()
                ]
                self._leases.start(living, now.mono_ns)
                timed = () if self._group_timeout_ns is None else self.state.groups
                self._times.start(timed, now.mono_ns)
            elif isinstance(event, HeldBack):
                self._held_back = sorted({tp.topic for tp in event.partitions})
                self._leases.hold(bool(event.partitions))
                self._times.hold(bool(event.partitions))
            elif isinstance(event, Published):
                self._on_durable(event)
            elif isinstance(event, StopAsked):
                self._stopped = True
            else:
                assert_never(event)
        self._round(now)
        self._note_turn(now)
        self._heartbeat(now)
        return Outputs(publish=self._publish, effects=list(self._effects))

    def _begin(self, now: Now) -> None:
        if self._started is None:
            self._started = now
            self._started_ns = max(now.wall_ns, self.state.now_ns)

    def _round_ns(self, now: Now) -> int:
        assert self._started is not None
        return self._started_ns + now.mono_ns - self._started.mono_ns

    def _read(self, record: Record, now: Now) -> None:
        if record.topic == self._topics.control:
            if not self.state.done:
                self._fold(record, now)
        elif record.topic == self._topics.metrics:
            self._note_status(record, now)

    def _fold(self, record: Record, now: Now) -> None:
        if len(self._folded) >= CONTROL_MAX:
            self._round(now)
            if self.state.done:
                return
        decoded = read_control(record.value)
        if isinstance(decoded, SchemaError):
            self._bury(record, decoded, now)
        elif isinstance(decoded, WorkerJoined):
            self._leases.renew((decoded.worker, record.offset), now.mono_ns)
            self._note_lost(self.state.workers.get(decoded.worker))
        elif isinstance(decoded, FROM_WORKERS):
            self._leases.renew((decoded.worker, decoded.incarnation), now.mono_ns)
        rejected = self.state.counters.rejected
        apply_control(self.state, record.offset, decoded)
        if self.state.counters.rejected > rejected:
            LOG.warning("control record rejected: %s", self.state.counters.rejection)
        self._folded.append(fold_bytes(record.offset, record.value))
        self._control_next = record.offset + 1

    def _note_status(self, record: Record, now: Now) -> None:
        try:
            status = decode_metrics(record.value)
        except SchemaError as error:
            self._bury(record, error, now)
            return
        if isinstance(status, WorkerStatus):
            key = (status.worker, status.incarnation)
            self._statuses[key] = merged(self._statuses.get(key), status)
            if self._caught_up and (worker := self.state.worker_of(*key)) is not None:
                self._note_pressure(worker, status.kv_used_tokens, now)
                self._note_off_engine(worker, status.off_engine)
            self._leases.renew(key, now.mono_ns)

    def _note_pressure(self, worker: Worker, used_tokens: int, now: Now) -> None:
        key = worker.name, worker.incarnation
        full = 0 < KV_PRESSURE * worker.kv_tokens < used_tokens and bool(worker.requests)
        if full and now.mono_ns >= self._press_due_ns.get(key, 0):
            self._press_due_ns[key] = now.mono_ns + PRESSURE_NS
        elif worker.pressed and not full:
            self._press_due_ns.pop(key, None)
        else:
            return
        self._pressures[key] = KvPressure(
            worker=worker.name, incarnation=worker.incarnation, used_tokens=used_tokens
        )

    def _note_off_engine(self, worker: Worker, reported: int) -> None:
        key = worker.name, worker.incarnation
        requests = min(reported, len(worker.requests))
        least = max(1, worker.slots // OFF_ENGINE_SHARE) if requests else 1
        self._off_engine.pop(key, None)
        if abs(requests - worker.off_engine) >= least:
            self._off_engine[key] = OffEngine(
                worker=worker.name, incarnation=worker.incarnation, requests=requests
            )

    def _note_lost(self, worker: Worker | None) -> None:
        if worker is None:
            return
        status = self._statuses.get((worker.name, worker.incarnation))
        progress: Mapping[str, Resume] = {} if status is None else status.progress
        for trajectory in sorted(worker.requests & progress.keys()):
            resume = progress[trajectory]
            self._observed.append(Progressed(trajectory=trajectory, resume=resume))

    def _observe(self, now: Now) -> None:
        for name, incarnation in self._leases.expired(self._lives, now.mono_ns, self._lease_ns):
            self._observed.append(LeaseExpired(worker=name, incarnation=incarnation))
            self._note_lost(self.state.workers[name])
        self._observed += [self._pressures[key] for key in filter(self._lives, self._pressures)]
        self._observed += [self._off_engine[key] for key in filter(self._lives, self._off_engine)]
        self._pressures, self._off_engine = {}, {}
        over = self._times.expired(self._generates, now.mono_ns, self._group_timeout_ns)
        self._observed += [GroupExpired(group=name) for name in over]
        if now.mono_ns >= self._period_due_ns:
            self._period_due_ns = now.mono_ns + self._period_ns
            self._observed.append(PlanPeriod())

    def _lives(self, key: Incarnation) -> bool:
        return self.state.worker_of(*key) is not None

    def _generates(self, group: str) -> bool:
        entry = self.state.groups.get(group)
        return entry is not None and entry.phase == "generating"

    @property
    def _group_timeout_ns(self) -> int | None:
        config = self.state.config
        timeout_s = None if config is None else config.rollout.group_timeout_s
        return None if timeout_s is None else int(timeout_s * 1e9)

    def _round(self, now: Now) -> None:
        state = self.state
        if state.done:
            return
        if self._caught_up:
            self._observe(now)
        for observation in self._observed:
            apply_observation(state, observation)
        before_ns, state.now_ns = state.now_ns, self._round_ns(now)
        due = bool(state.trigger) and self._caught_up
        heavy = sum(map(len, self._folded)) > FOLDED_BYTES_MAX
        self._put_off = heavy and not self._put_off
        plans = self._caught_up and not self._put_off
        decisions = decide(state, samplers=self._samplers) if plans else []
        for decision in decisions if self._group_timeout_ns is not None else ():
            if isinstance(decision, Dispatch):
                self._times.renew(decision.spec.group, now.mono_ns)
        self._more = is_cut(decisions) or (self._caught_up and not plans)
        if not (self._folded or self._observed or decisions or due):
            state.now_ns = before_ns
            return
        round_ = Round(
            ordinal=state.rounds,
            incarnation=self._incarnation,
            now_ns=state.now_ns,
            control_next=self._control_next,
            observations=tuple(self._observed),
            decisions=tuple(decisions),
            planned=plans,
        )
        self._seal(round_)

    def _seal(self, round_: Round) -> None:
        state = self.state
        close_round(state, round_)
        if is_digest_due(state, round_.ordinal):
            round_ = msgspec.structs.replace(round_, state_digest=state.digest())
        else:
            state.leaves.settle(state, rounds_to_digest(round_.ordinal))
        state.chain, value = seal(state.chain, b"".join(self._folded), round_)
        tag = self._keep(round_)
        record = Append(topic=self._topics.decisions, value=value)
        self._publish.append(Publish(record=record, tag=tag))
        self._folded = []
        self._observed = []

    def _keep(self, round_: Round) -> str:
        every = self._snapshot_every
        if not every or (round_.ordinal + 1) % every or round_.state_digest is None:
            return ""
        self._snapshot = round_.state_digest, body_of(self.state)
        return round_.state_digest

    def _on_durable(self, event: Published) -> None:
        if self._snapshot is None or self._snapshot[0] != event.tag:
            return
        digest, body = self._snapshot
        self._snapshot = None
        self._effects.append(WriteSnapshot(offset=event.offset, digest=digest, body=body))

    def _note_turn(self, now: Now) -> None:
        stands = _progress(self.state)
        if stands != self._last_progress:
            self._last_progress = stands
            self._last_progress_ns = now.mono_ns if self._caught_up else None

    def _heartbeat(self, now: Now) -> None:
        if now.mono_ns < self._schedule.due_ns:
            return
        if self._metrics_keep_ns and self._caught_up and now.mono_ns >= self._trim_due_ns:
            self._trim_due_ns = now.mono_ns + TRIM_EVERY_NS
            before_ns = now.wall_ns - self._metrics_keep_ns
            self._effects.append(TrimMetrics(topic=self._topics.metrics, before_ns=before_ns))
        self._times.keep(self._generates)
        self._statuses = {key: self._statuses[key] for key in filter(self._lives, self._statuses)}
        dues = self._press_due_ns
        self._press_due_ns = {key: dues[key] for key in filter(self._lives, dues)}
        status = OrchestratorStatus(
            at_ns=now.wall_ns,
            waits=self._waits.update(
                waits(self.state, since_ns=self._last_progress_ns, held_back=self._held_back),
                mono_ns=now.mono_ns,
                wall_ns=now.wall_ns,
            ),
            cost=self._cost(),
            incarnation=self._incarnation,
            version=self.state.version,
            open_groups=len(self.state.groups),
            queued_requests=sum(map(len, self.state.queues.values())),
            closed_by=admission_limit(self.state),
        )
        to = Address(self._topics.metrics, STATUS_KEY)
        self._publish += self._schedule.publish(status, to, now.mono_ns)

    def _bury(self, record: Record, error: SchemaError, now: Now) -> None:
        try:
            value, headers = encode_dead_letter(dead_letter_of(record, error, now.wall_ns))
        except SchemaError as unfit:
            LOG.error("unreadable record at %s: %s", record.offset, unfit.message)
            return
        topic = self._topics.dead_letters
        self._publish.append(Publish(record=Append(topic=topic, value=value, headers=headers)))


def _progress(state: State) -> tuple[int, bool, int]:
    trains = state.training is not None
    return state.version, trains, 0 if trains else len(state.parts)
