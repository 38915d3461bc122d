"""Metrics of every step and evaluation, for trackers (docs/monitoring.md).

A row depends only on earlier records, so that every reader gets the same rows; statuses are lossy
and not used.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dora_pipe.bus.bus import Bus
from dora_pipe.consumers.contributions import Contributed, Contributions, contributed
from dora_pipe.core.errors import BusError
from dora_pipe.core.system.clock import Clock
from dora_pipe.ledger.account import StepEnded
from dora_pipe.ledger.evaluations import EvaluationEnded
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.ledger.history import rewards_of
from dora_pipe.observe.following import follow_log
from dora_pipe.observe.run_stats import RunStats, StepStats, learning_of
from dora_pipe.observe.text import ahead_share
from dora_pipe.observe.trackers.sink import TrackedRun, Tracker
from dora_pipe.schemas.control import (
    INFRASTRUCTURE,
    RunStarted,
    by_fault,
    error_class,
    fault_of,
)
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Cumulative values at a commit."""

    sampled: float
    migrations: Counter[str]
    outcomes: Counter[str]
    errors: Counter[str]


def track(
    bus: Bus,
    topics: Topics,
    tracker: Tracker,
    contributions: Contributions,
    *,
    clock: Clock | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Give a tracker the rows in the log; return whether the run has ended.

    With a clock, follows until the run ends or `stop`. Raises BusError, LogTruncated, errors of the
    tracker.
    """
    stats = TrackerStats(topics.run, contributions, tracker)
    if clock is None:
        stats.read(bus, topics, statuses=False)
        return stats.over

    def opened() -> LogFollower:
        nonlocal stats
        stats = TrackerStats(topics.run, contributions, tracker)
        return LogFollower(bus, topics, stats)

    def turn(follower: LogFollower) -> bool:
        while follower.advance():
            pass
        return stats.over or stop()

    def away(error: BusError) -> bool:
        LOG.warning("metrics wait: cannot read the log: %s", error.message)
        return stop()

    follow_log(opened, turn, clock=clock, away=away)
    return stats.over


class TrackerStats(RunStats):
    """Statistics that give a tracker each row it lacks."""

    def __init__(self, run: str, contributions: Contributions, tracker: Tracker) -> None:
        super().__init__(run)
        self._contributions, self._tracker = contributions, tracker
        self._skip = 0
        self._before = self._sums()

    def _begin(self, fact: RunStarted) -> None:
        super()._begin(fact)
        run = TrackedRun(name=fact.run, started_ns=fact.at_ns, config=fact.config)
        self._skip = self._tracker.begin(run)

    def _evaluated(self, ended: EvaluationEnded) -> None:
        super()._evaluated(ended)
        if ended.reward is None:
            return
        name = f"evaluation/{ended.evaluation}/" if ended.evaluation else "evaluation/"
        metrics = {"reward": ended.reward, **ended.metrics}
        self._give(
            ended.version,
            ended.ended_ns,
            lambda: {f"{name}{metric}": value for metric, value in metrics.items()},
        )

    def _step(self, ended: StepEnded) -> None:
        super()._step(ended)
        step, before, now = self.steps[-1], self._before, self._sums()
        self._before = now
        learning = learning_of({}, ended.fact.settings)
        self._give(
            step.step,
            step.committed_ns,
            lambda: {
                **_rewards(step, ended),
                **_staleness(step, self.bound),
                **{f"train/{name}": value for name, value in ended.fact.metrics.items()},
                **{f"train/{name}": value for name, value in learning.items()},
                **_ratios(self._contributed(ended)),
                **_times(step, ended, now.sampled - before.sampled),
                **self._worker_metrics(),
                **_counts("migrations", before.migrations, now.migrations),
                **_counts("groups", before.outcomes, now.outcomes),
                **_invalid(now.errors - before.errors, now.errors),
            },
        )

    def _give(self, step: int, at_ns: int, metrics: Callable[[], dict[str, float]]) -> None:
        if self._skip:
            self._skip -= 1
        else:
            self._tracker.step(step, metrics(), at_ns=at_ns)

    def _sums(self) -> _Sums:
        return _Sums(
            sampled=self.lengths.total,
            migrations=Counter(self.migrations),
            outcomes=Counter(self.outcomes),
            errors=Counter(self.errors),
        )

    def _contributed(self, ended: StepEnded) -> Contributed:
        return contributed(ended.fact.step, self._contributions(ended.fact.contributions.sha256))

    def _worker_metrics(self) -> dict[str, float]:
        """Use only facts and decisions."""
        present = self.account.present()
        return {
            "workers/present": float(len(present)),
            "workers/versions": float(
                len({worker.served for worker in present if worker.served >= 0})
            ),
            "workers/lost": float(sum(self.lost.values())),
        }


def _rewards(step: StepStats, ended: StepEnded) -> dict[str, float]:
    results = ended.results
    if not results:
        return {}
    valid = rewards_of(results)
    outside = sum(error_class(result.error) in INFRASTRUCTURE for result in results)
    metrics: dict[str, float] = {
        "reward/raw": math.fsum(reward / len(results) for reward in valid),
        "reward/invalid": 1 - len(valid) / len(results),
        "reward/infrastructure": outside / len(results),
    }
    metrics |= {f"reward/task/{name}": value for name, value in step.task_rewards}
    metrics |= {
        f"reward/part/{task and task + '/'}{name}": value
        for task, parts in step.parts.items()
        for name, value in parts.items()
    }
    return metrics if step.reward is None else {"reward/valid": step.reward, **metrics}


def _invalid(new: Counter[str], ever: Counter[str]) -> dict[str, float]:
    metrics: dict[str, float] = {
        f"invalid/{fault}": float(sum(of.values())) for fault, of in by_fault(new).items()
    }
    return metrics | {f"invalid/{fault_of(name)}/{name}": float(new[name]) for name in sorted(ever)}


def _staleness(step: StepStats, bound: int | None) -> dict[str, float]:
    metrics: dict[str, float] = {} if bound is None else {"staleness/bound": float(bound)}
    groups = sum(count for _, count in step.staleness)
    if groups:
        metrics |= {f"staleness/groups_{value}": float(count) for value, count in step.staleness}
        metrics["staleness/mean"] = sum(value * count for value, count in step.staleness) / groups
        metrics["staleness/max"] = float(step.staleness[-1][0])
    return metrics


def _ratios(contributed: Contributed) -> dict[str, float]:
    metrics: dict[str, float] = {
        f"ratio/mismatch_staleness_{staleness}": value for staleness, value in contributed.mismatch
    }
    if contributed.effective is not None:
        metrics["ratio/effective_sample_ratio"] = contributed.effective
    return metrics


def _times(step: StepStats, ended: StepEnded, sampled: float) -> dict[str, float]:
    metrics: dict[str, float] = {
        "time/trainer_waited_s": step.waited_s,
        "time/training_s": step.training_s,
        "time/compute_s": ended.fact.compute_s,
    }
    if ended.fact.parts:
        metrics["time/early_s"] = step.early_s
        metrics["time/early_share"] = ahead_share(step.early_s, step.training_s)
    if step.seconds is None or step.seconds <= 0:
        return metrics
    trajectories = sum(len(group.trajectories) for group in ended.fact.groups)
    return {
        **metrics,
        "time/step_s": step.seconds,
        "throughput/trained_tokens_per_s": step.tokens / step.seconds,
        "throughput/trained_trajectories_per_s": trajectories / step.seconds,
        "throughput/sampled_tokens_per_s": sampled / step.seconds,
    }


def _counts(group: str, before: Counter[str], now: Counter[str]) -> dict[str, float]:
    return {f"{group}/{name}": float(now[name] - before[name]) for name in sorted(now)}
