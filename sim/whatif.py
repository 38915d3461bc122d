"""Decides how a finished run is simulated again: as it was, and with other settings.

The model takes the log's lengths, rewards, speeds and delays (`dora_pipe.sim.whatif_facts`) and
runs production's planner over them. Cores are shared: if more processes are busy than there are
cores, everything takes longer by that ratio. What the trainer counts for among them follows from
how much slower the engines were while it trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from dora_pipe.config.load import leaves
from dora_pipe.config.model import Config, in_flight_batches
from dora_pipe.core.errors import UsageError
from dora_pipe.sim.modelled_cluster import Cluster, ClusterPlan, ClusterRun, Evaluations
from dora_pipe.sim.modelled_worker import EngineRates, TrainerRates, WorkerSize
from dora_pipe.sim.paradigms import Pool, PoolPlan, settings_of
from dora_pipe.sim.paradigms_planner import LegacyFill, Planner, Production, Proportional
from dora_pipe.sim.whatif_facts import Key, Measured

TURN_S: Final = 0.01
"""Events closer together than this are taken for one: the delays are in the log already."""
NEVER_FILLS: Final = 1e12
"""Prefill tokens per second: its time is in the regression already."""

Scheduler = Literal["production", "one-batch", "proportional", "legacy-fill", "drop", "roll-flash"]
SCHEDULERS: Final[tuple[Scheduler, ...]] = get_args(Scheduler)
"""Production's, and those that exist in the simulator only; see bench/results/paper.md."""


KEYS: Final = frozenset(
    {
        *("run.steps", "groups.size", "groups.per_step", "groups.filter_zero_advantage"),
        *("staleness.max_staleness", "staleness.in_flight_batches", "staleness.interruptible"),
        *("workers.count", "workers.slots", "workers.prefetch"),
    }
)
"""What every model here knows of a configuration."""

CLUSTER_KEYS: Final = KEYS | {
    *("evaluation.every", "evaluation.prompts", "evaluation.siblings", "timing.plan_period_s"),
    *("trainer.parts", "workers.elastic"),
}
"""What the model with versions on workers knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """How a run goes; times in seconds."""

    what: str
    wall_s: float
    """Until the last commit, from when the workers had joined."""
    step_s: float
    """Mean over the steps."""
    waited_s: float
    """Of a step: nobody trains."""
    staleness: float
    """Mean over trained groups."""
    slots_used: float | None
    """Share of slots with a request."""
    moves: int | None


def as_measured(measured: Measured) -> Estimate:
    """What the log says itself."""
    steps = measured.steps
    trained = sum(one.committed_s - one.taken_s for one in steps)
    return Estimate(
        what="measured",
        wall_s=measured.wall_s,
        step_s=measured.wall_s / len(steps),
        waited_s=(measured.wall_s - trained) / len(steps),
        staleness=sum(one.staleness for one in steps) / len(steps),
        slots_used=None,
        moves=None,
    )


def check_question(
    measured: Measured, before: Config, now: Config, *, scheduler: Scheduler = "production"
) -> None:
    """Raise UsageError for a changed key that no answer here depends on, or that no log answers.

    `before` is the run's configuration file, `now` what is asked about.
    """
    if len(now.evaluations) > 1:
        raise UsageError("the model knows runs with one evaluation; this one has several")
    old, new = leaves(before), leaves(now)
    known = KEYS if _is_pool(now, scheduler) else CLUSTER_KEYS
    odd = sorted(key for key in old if old[key] != new.get(key) and key not in known)
    if odd:
        raise UsageError(
            f"{odd[0]}: the model does not know it, so its answer would be as if it were unchanged",
            hint=f"it knows {', '.join(sorted(known))}",
        )
    _check_measured("groups", measured.lengths, "groups.size", now.groups.size)
    asked = now.evaluation
    if measured.eval_lengths and old["evaluation.siblings"] != asked.siblings:
        _check_measured("evaluations", measured.eval_lengths, "evaluation.siblings", asked.siblings)
    rows = len({ordinal for ordinal, _ in measured.eval_lengths})
    if asked.prompts > max(rows, before.evaluation.prompts):
        raise UsageError(
            f"evaluation.prompts: the log has the lengths of {rows}, not of {asked.prompts}"
        )


def _check_measured(what: str, measured: Mapping[Key, int], key: str, asked: int) -> None:
    """Raise UsageError unless some group has the lengths of so many siblings."""
    siblings: dict[int, int] = {}
    for ordinal, _ in measured:
        siblings[ordinal] = siblings.get(ordinal, 0) + 1
    most = max(siblings.values(), default=0)
    if asked > most:
        raise UsageError(
            f"{key}: the log has {what} of {most}, and no lengths of more responses to a prompt",
            hint=f"{key} = {most} or less; groups.per_step may be larger",
        )


def _is_pool(config: Config, scheduler: Scheduler) -> bool:
    """Whether the model is the one without versions on workers."""
    return config.staleness.interruptible or scheduler in ("drop", "roll-flash")


def estimate(
    measured: Measured,
    config: Config,
    *,
    what: str,
    cores: int,
    scheduler: Scheduler = "production",
) -> Estimate:
    """How long the run takes with this configuration, on the hardware that was measured."""
    contention = Contention.of(measured, cores)
    if _is_pool(config, scheduler):
        return _summed(what, Pool(pool_plan(measured, config, scheduler, contention)).run())
    return _summed(what, Cluster(cluster_plan(measured, config, scheduler, contention)).run())


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """Busy processes on cores; see the head of this file."""

    cores: int
    trainer: float
    """Busy processes that the trainer counts for."""
    workers: int
    """Of the measured run: its speeds were measured with all of them busy."""
    busy_training: float
    """Of them, on the mean while a step was trained."""

    @classmethod
    def of(cls, measured: Measured, cores: int) -> Contention:
        """What explains the slow-down that was measured."""
        workers = len(measured.workers)
        alone = max(1.0, workers / cores)
        busy = cores * (1.0 + measured.speed.slower) * alone
        return cls(
            cores=cores,
            trainer=max(0.0, busy - workers),
            workers=workers,
            busy_training=measured.busy_training,
        )

    def slower(self, busy: float, training: bool) -> float:
        """How many times as long everything takes, against all measured workers and no training."""
        now = max(1.0, (busy + (self.trainer if training else 0.0)) / self.cores)
        return now / max(1.0, self.workers / self.cores)

    @property
    def while_training(self) -> float:
        """In the measured run, while a step was trained."""
        return self.slower(self.busy_training, True)


def cluster_plan(
    measured: Measured, config: Config, scheduler: Scheduler, contention: Contention
) -> ClusterPlan:
    """Production's planner on the measured hardware."""
    planners: dict[str, Planner] = {"proportional": Proportional(), "legacy-fill": LegacyFill()}
    return ClusterPlan(
        workers=_workers(measured, config),
        rates=_rates(measured),
        trainer=_trainer(measured, contention),
        lengths=lengths_of(measured.lengths, config.groups.size),
        group_size=config.groups.size,
        per_step=config.groups.per_step,
        steps=config.run.steps,
        max_staleness=config.staleness.max_staleness,
        parts=config.trainer.parts,
        in_flight_batches=config.staleness.in_flight_batches,
        one_batch=scheduler == "one-batch",
        planner=planners.get(scheduler, Production()),
        reward=rewards_of(measured.rewards),
        filter_zero_advantage=config.groups.filter_zero_advantage,
        evaluation=_evaluations(measured, config),
        report_s=delays_of(measured.reports_s),
        place_s=measured.place_s,
        react_s=measured.react_s,
        first_step_s=measured.first_step_s,
        slower=contention.slower,
        round_s=TURN_S,
        plan_period_s=config.timing.plan_period_s,
    )


def pool_plan(
    measured: Measured, config: Config, scheduler: Scheduler, contention: Contention
) -> PoolPlan:
    """A paradigm without versions on workers; its cores are shared as in the measured run."""
    trainer = _trainer(measured, contention)
    slower = contention.slower(len(_workers(measured, config)), True)
    rates = _rates(measured)
    return PoolPlan(
        workers=_workers(measured, config),
        rates=EngineRates(
            tau_s=rates.tau_s * slower,
            rise=rates.rise,
            full=rates.full,
            prefill_tokens_s=NEVER_FILLS,
            load_s=rates.load_s,
        ),
        trainer=TrainerRates(fixed_s=trainer.fixed_s * slower, token_s=trainer.token_s * slower),
        lengths=lengths_of(measured.lengths, config.groups.size),
        group_size=config.groups.size,
        per_step=config.groups.per_step,
        steps=config.run.steps,
        **settings_of(
            scheduler,
            batches=in_flight_batches(config.staleness),
            per_step=config.groups.per_step,
            group_size=config.groups.size,
            bound=config.staleness.max_staleness,
        ),
        reward=rewards_of(measured.rewards),
        filter_zero_advantage=config.groups.filter_zero_advantage,
    )


def lengths_of(measured: Mapping[Key, int], size: int) -> Callable[[int], Sequence[int]]:
    """Lengths by ordinal: as measured, and beyond that the measured groups over again.

    Groups that the run did not finish have no lengths; larger ones than it had are refused before
    (`check_question`).
    """
    groups: dict[int, dict[int, int]] = {}
    for (ordinal, sibling), tokens in measured.items():
        groups.setdefault(ordinal, {})[sibling] = tokens
    whole = {
        ordinal: tuple(found[sibling] for sibling in range(size))
        for ordinal, found in groups.items()
        if set(range(size)) <= found.keys()
    }
    order = sorted(whole)
    assert order, "no group is whole"
    return lambda ordinal: whole.get(ordinal) or whole[order[ordinal % len(order)]]


def rewards_of(measured: Mapping[Key, float | None]) -> Callable[[int, int], float | None]:
    """Rewards by (ordinal, sibling), beyond the measured ones over again."""
    count = 1 + max((ordinal for ordinal, _ in measured), default=0)

    def reward(ordinal: int, sibling: int) -> float | None:
        found = measured.get((ordinal, sibling), measured.get((ordinal % count, sibling)))
        return found if found is not None else float(sibling % 2)

    return reward


def delays_of(measured: Sequence[float]) -> Callable[[int, int], float]:
    """The measured delays, one for each (ordinal, sibling), in an order that means nothing."""
    count = len(measured)
    return lambda ordinal, sibling: measured[(ordinal * 7919 + sibling * 104_729) % count]


def _workers(measured: Measured, config: Config) -> list[WorkerSize]:
    """Those that joined; as configured where the configuration was changed."""
    was, now = measured.config.workers, config.workers
    if (was.count, was.slots, was.prefetch) == (now.count, now.slots, now.prefetch):
        found = measured.workers
    else:
        found = [(f"w{one}", now.slots, now.prefetch) for one in range(now.count)]
    return [
        WorkerSize(name=name, slots=slots, prefetch=ahead, elastic=now.is_elastic(name))
        for name, slots, ahead in found
    ]


def _rates(measured: Measured) -> EngineRates:
    speed = measured.speed
    return EngineRates(
        tau_s=speed.t0_s,
        rise=speed.t1_s / speed.t0_s,
        full=1,
        prefill_tokens_s=NEVER_FILLS,
        load_s=measured.load_s,
    )


def _trainer(measured: Measured, contention: Contention) -> TrainerRates:
    """As it would be with no worker beside it more than was measured."""
    slower = contention.while_training
    return TrainerRates(
        fixed_s=measured.train_fixed_s / slower, token_s=measured.train_token_s / slower
    )


def _evaluations(measured: Measured, config: Config) -> Evaluations | None:
    size = config.evaluation.siblings
    whole = {ordinal for ordinal, _ in measured.eval_lengths}
    prompts = min(config.evaluation.prompts, len(whole))
    if not prompts:
        return None
    return Evaluations(
        every=config.evaluation.every,
        prompts=prompts,
        siblings=size,
        lengths=lengths_of(measured.eval_lengths, size),
    )


def _summed(what: str, run: ClusterRun) -> Estimate:
    spans, wall_s = run.spans, run.spans[-1].committed_s
    trained = sum(one.committed_s - one.taken_s for one in spans)
    groups = [pair for one in spans for pair in one.staleness]
    return Estimate(
        what=what,
        wall_s=wall_s,
        step_s=wall_s / len(spans),
        waited_s=(wall_s - trained) / len(spans),
        staleness=sum(stale * count for stale, count in groups) / sum(c for _, c in groups),
        slots_used=run.slot_s / run.slots / run.wall_s,
        moves=run.moves,
    )
