"""Production's planner and state on modeled workers and a trainer.

Durations are modeled; bus, record bytes and role loops are omitted. Time advances to the next
event, at least `round_s`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from dora_pipe.bench.records import (
    NO_DIGEST,
    role_started,
    run_started,
    step_committed,
    worker_joined,
    worker_ready,
)
from dora_pipe.bench.studies.paper.hardware import (
    NEVER_S,
    EngineRates,
    Left,
    ModelledWorker,
    TrainerRates,
    WorkerSize,
)
from dora_pipe.config.model import Config
from dora_pipe.core.errors import ResourceError
from dora_pipe.orchestrator.apply_control import apply_control
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.orchestrator.fold import apply_observation, note_slots
from dora_pipe.orchestrator.planner import decide
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import (
    AnyControl,
    Command,
    LoggedEntry,
    RequestReleased,
    Resume,
    TakenGroup,
    TrajectoriesLogged,
)
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import (
    AnyDecision,
    AnyObservation,
    Assign,
    Cancel,
    Migrate,
    PlanPeriod,
    Schedule,
    ScheduledRequest,
    TakeBatch,
    TakePart,
)

SECOND_NS: Final = 1_000_000_000
ROUNDS_MAX: Final = 200_000
"""Rounds of a stuck run."""
MANY: Final = 50
"""Decisions after which a plan may be cut."""

ANY_ROW: Final = Samplers(recorded={})
"""Rows make no difference here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """Run on modeled hardware; `lengths(ordinal)` are sampled tokens."""

    workers: Sequence[WorkerSize]
    rates: EngineRates
    trainer: TrainerRates
    lengths: Callable[[int], Sequence[int]]
    group_size: int
    per_step: int
    steps: int
    max_staleness: int
    parts: int = 1
    """Parts of a batch, computed as they arrive; fixed step costs come with the last."""
    async_batches: float | Literal["auto"] | None = None
    one_batch: bool = False
    """Set C to 2 during a step and 1 otherwise: published one-step off-policy training."""
    prompt_tokens: int = 0
    round_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """Training step in seconds."""

    step: int
    taken_s: float
    committed_s: float
    tokens: int
    staleness: tuple[tuple[int, int], ...]
    """(staleness, groups), sorted."""
    early_s: float = 0.0
    """Part computation before `taken_s`."""


@dataclass(slots=True, kw_only=True)
class ClusterRun:
    spans: list[StepSpan] = field(default_factory=list)
    slot_s: float = 0.0
    """Active requests integrated over time, summed over workers."""
    wall_s: float = 0.0
    slots: int = 0
    workers: int = 0
    moves: int = 0
    loads: int = 0
    rounds: int = 0
    requests: int = 0


class Cluster:
    """Modeled cluster. Example: ``Cluster(plan).run().spans[-1].committed_s``"""

    def __init__(self, plan: ClusterPlan) -> None:
        self.plan = plan
        self.state = State()
        self.now_s = 0.0
        self.run_ = ClusterRun(
            slots=sum(worker.slots for worker in plan.workers), workers=len(plan.workers)
        )
        self._offset = 0
        self._lefts: dict[str, Left] = {}
        self._training: tuple[TakeBatch, float] | None = None
        self._parts_until_s = 0.0
        """End of part computation."""
        self._parts_s = 0.0
        """Total duration of that computation."""
        self._ended: list[tuple[float, int, ModelledWorker, ScheduledRequest]] = []
        """Unreported responses by time."""
        self._ends = 0
        config = _config(plan)
        self._plan_period_s = self._period_s = config.timing.plan_period_s
        self._apply(run_started(config))
        self._apply(role_started("trainer"))
        self._workers = {worker.name: self._join(worker) for worker in plan.workers}

    def run(self) -> ClusterRun:
        """Run to the last step."""
        self._limit_batches(training=False)
        for _ in range(ROUNDS_MAX):
            self._round()
            if self.state.version >= self.plan.steps:
                return self._closed()
            next_s = self._next_s()
            if next_s == NEVER_S:
                raise ResourceError("the modelled run has no pending event")
            self._advance(max(next_s, self.now_s + self.plan.round_s))
        raise ResourceError(f"{ROUNDS_MAX} rounds without an end: the modelled run loops")

    def _apply(self, record: AnyControl) -> int:
        offset, self._offset = self._offset, self._offset + 1
        rejected = self.state.counters.rejected
        apply_control(self.state, offset, record)
        assert self.state.counters.rejected == rejected, self.state.counters.rejection
        return offset

    def _join(self, size: WorkerSize) -> ModelledWorker:
        incarnation = self._apply(worker_joined(size.name, size.slots, size.prefetch))
        return ModelledWorker(
            size,
            self.plan.rates,
            self._lefts,
            incarnation=incarnation,
            prompt_tokens=self.plan.prompt_tokens,
        )

    def _advance(self, now_s: float) -> None:
        self.now_s = now_s
        self.state.now_ns = int(now_s * SECOND_NS)
        for worker in self._workers.values():
            for request in worker.advance(now_s):
                self._ends += 1
                heapq.heappush(self._ended, (now_s, self._ends, worker, request))
        self._report()
        for worker in self._workers.values():
            assigned = worker.ready(now_s)
            if assigned is not None:
                identity = (worker.size.name, worker.incarnation, assigned.version, assigned.digest)
                self._apply(worker_ready(*identity, load_ms=worker.batch.rates.load_s * 1e3))
        if self._training is not None and self._training[1] <= now_s + 1e-9:
            self._commit(self._training[0])
        if now_s >= self._period_s:
            self._period_s = now_s + self._plan_period_s
            self._note(PlanPeriod())

    def _report(self) -> None:
        grouped: dict[tuple[str, int], list[ScheduledRequest]] = {}
        while self._ended and self._ended[0][0] <= self.now_s + 1e-9:
            _, _, worker, request = heapq.heappop(self._ended)
            if request.trajectory not in self._lefts:  # Cancelled after its end.
                continue
            grouped.setdefault((worker.size.name, request.spec.version), []).append(request)
        for (name, version), requests in grouped.items():
            entries = tuple(self._entry(request) for request in requests)
            self._apply(
                TrajectoriesLogged(
                    at_ns=0,
                    worker=name,
                    incarnation=self._workers[name].incarnation,
                    version=version,
                    digest=requests[0].spec.digest,
                    trajectories=entries,
                )
            )

    def _note(self, observation: AnyObservation) -> None:
        apply_observation(self.state, observation)

    def _entry(self, request: ScheduledRequest) -> LoggedEntry:
        progress = self._lefts.pop(request.trajectory)
        self.run_.requests += 1
        return LoggedEntry(
            trajectory=request.trajectory,
            attempt=request.attempt,
            partition=request.spec.partition,
            offset=self._offset,
            sha256=NO_DIGEST,
            bytes=0,
            tokens=round(progress.done + progress.left),
            finish="stop",
            reward=float(request.sample % 2),
        )

    def _commit(self, batch: TakeBatch) -> None:
        self._training = None
        self._apply(step_committed(self.state, batch))
        self._limit_batches(training=False)

    def _limit_batches(self, *, training: bool) -> None:
        if self.plan.one_batch:
            limit = 2.0 if training else 1.0
            args = {"staleness.async_batches": limit}
            self._apply(Command(at_ns=0, user="model", verb="set", args=args))

    def _round(self) -> None:
        decisions = decide(self.state, samplers=ANY_ROW)
        note_slots(self.state)
        self.run_.rounds += 1
        took = False
        for decision in decisions:
            took = self._obey(decision) or took
        if took:
            self._limit_batches(training=True)
        moved = any(isinstance(decision, Migrate) for decision in decisions)
        if took or moved or len(decisions) >= MANY:
            self._round()

    def _obey(self, decision: AnyDecision) -> bool:
        if isinstance(decision, TakeBatch):
            self._train(decision)
            return True
        if isinstance(decision, TakePart):
            self._train_part(decision)
        if isinstance(decision, Schedule):
            for request in decision.requests():
                self._place(request)
        elif isinstance(decision, Assign):
            self._workers[decision.worker].assign(decision, self.now_s)
        elif isinstance(decision, Migrate):
            self._move(decision)
        elif isinstance(decision, Cancel):
            self._workers[decision.worker].release(decision.trajectory)
            self._lefts.pop(decision.trajectory, None)
        return False

    def _place(self, request: ScheduledRequest) -> None:
        if request.trajectory not in self._lefts:
            length = self.plan.lengths(request.spec.ordinal)[request.sample]
            self._lefts[request.trajectory] = Left(left=float(length))
        self._workers[request.worker].place(request, self.now_s)

    def _move(self, decision: Migrate) -> None:
        worker = self._workers[decision.worker]
        if not worker.holds(decision.trajectory):  # Ended, to be reported.
            return
        ran = decision.trajectory in worker.running
        resume = worker.release(decision.trajectory)
        self.run_.moves += ran
        kv = self._handover(resume) if ran else None
        self._apply(
            RequestReleased(
                at_ns=0,
                worker=decision.worker,
                incarnation=decision.incarnation,
                trajectory=decision.trajectory,
                attempt=decision.attempt,
                resume=resume,
                kv=kv,
            )
        )

    def _handover(self, resume: Resume | None) -> Blob:
        tokens = resume.tokens if resume is not None else 0
        return Blob(sha256=NO_DIGEST, bytes=tokens * self.plan.rates.kv_bytes)

    def _train(self, batch: TakeBatch) -> None:
        specs = [self.state.groups[group.group].spec for group in batch.groups]
        step_s = self._compute_s(batch.groups[sum(batch.parts) :])
        from_s = max(self.now_s, self._parts_until_s) if batch.parts else self.now_s
        parts_s, self._parts_s = self._parts_s if batch.parts else 0.0, 0.0
        staleness = Counter(batch.step - spec.version for spec in specs)
        self._training = batch, from_s + step_s
        self.run_.spans.append(
            StepSpan(
                step=batch.step,
                taken_s=self.now_s,
                committed_s=from_s + step_s,
                tokens=sum(sum(self.plan.lengths(spec.ordinal)) for spec in specs),
                staleness=tuple(sorted(staleness.items())),
                early_s=parts_s - (from_s - self.now_s),
            )
        )

    def _train_part(self, part: TakePart) -> None:
        seconds = self._compute_s(part.groups) - self.plan.trainer.fixed_s
        trained_s = self._training[1] if self._training else 0.0
        self._parts_until_s = max(self.now_s, trained_s, self._parts_until_s) + seconds
        self._parts_s += seconds

    def _compute_s(self, groups: Sequence[TakenGroup]) -> float:
        """Return the duration of a step including its fixed cost."""
        ordinals = [self.state.groups[group.group].spec.ordinal for group in groups]
        tokens = sum(sum(self.plan.lengths(ordinal)) for ordinal in ordinals)
        return self.plan.trainer.step_s(tokens=tokens)

    def _next_s(self) -> float:
        due_s = min(worker.next_s() for worker in self._workers.values())
        if self._training is not None:
            due_s = min(due_s, self._training[1])
        if self._ended:
            due_s = min(due_s, self._ended[0][0])
        return min(due_s, self._period_s) if due_s < NEVER_S else due_s

    def _closed(self) -> ClusterRun:
        run = self.run_
        run.wall_s = self.now_s
        for worker in self._workers.values():
            run.slot_s += worker.batch.slot_s
            run.loads += worker.loads
        return run


def _config(plan: ClusterPlan) -> Config:
    staleness: dict[str, Any] = {"max_staleness": plan.max_staleness}
    if plan.async_batches is not None:
        staleness["async_batches"] = plan.async_batches
    plain = {
        "run": {"name": "modelled", "steps": plan.steps, "seed": 0},
        "model": {"path": "none"},
        "task": {"kind": "none"},
        "rollout": {
            "group_size": plan.group_size,
            "prompts_per_step": plan.per_step,
            "filter_zero_advantage": False,
        },
        "trainer": {"batch_parts": plan.parts},
        "staleness": staleness,
        "evaluation": {"prompts": 0},
        "bus": {"partitions": 1},
    }
    return msgspec.convert(plain, Config)
