"""The figures of every step and evaluation, made from the log; docs/observe.md says what they mean.

A row is a function of what stands in the log before it, in the order of the fold, so that whoever
reads the log again gets the same rows. Statuses are therefore no source of it: they are lossy, and
a reader of a finished run meets them out of order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from dora_pipe.catalogue.account import StepEnded
from dora_pipe.catalogue.evaluations import EvaluationEnded
from dora_pipe.catalogue.group_history import rewards_of
from dora_pipe.observe.run_stats import Contributed, Contributions, RunStats, StepStats, contributed
from dora_pipe.observe.text import ahead_share
from dora_pipe.observe.trackers.sink import Figure, Spread
from dora_pipe.schemas.control import (
    INFRASTRUCTURE,
    RunStarted,
    StepCommitted,
    by_fault,
    error_class,
    fault_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureRow:
    """Figures at a step; those that are not known are left out."""

    step: int
    at_ns: int
    figures: dict[str, Figure]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """What only grows, as it stood at a commit."""

    sampled: float
    moves: Counter[str]
    fates: Counter[str]
    errors: Counter[str]


class FigureStats(RunStats):
    """Numbers of a run, and a row of figures for every step and evaluation. `begin` is told of the
    run, once, and says how many rows are not wanted: they were given before.

    Example: ``FigureStats("demo", lambda sha256: [], begin=lambda fact: 0)``, then `drain` after
    every piece of the log.
    """

    def __init__(
        self, run: str, contributions: Contributions, *, begin: Callable[[RunStarted], int]
    ) -> None:
        super().__init__(run)
        self._contributions = contributions
        self._on_begin = begin
        self._skip = 0
        self._rows: list[FigureRow] = []
        self._before = self._sums()

    def drain(self) -> list[FigureRow]:
        """The rows since the last call, in the order of the log."""
        rows, self._rows = self._rows, []
        return rows

    def _begin(self, fact: RunStarted) -> None:
        super()._begin(fact)
        self._skip = self._on_begin(fact)

    def _evaluated(self, ended: EvaluationEnded) -> None:
        super()._evaluated(ended)
        if ended.reward is not None:
            name = f"evaluation/{ended.evaluation}/" if ended.evaluation else "evaluation/"
            figures: dict[str, Figure] = {f"{name}reward": ended.reward}
            figures |= {f"{name}{figure}": value for figure, value in ended.figures.items()}
            self._add(lambda: FigureRow(step=ended.version, at_ns=ended.ended_ns, figures=figures))

    def _step(self, ended: StepEnded) -> None:
        super()._step(ended)
        step, before, now = self.steps[-1], self._before, self._sums()
        self._before = now
        self._add(
            lambda: FigureRow(
                step=step.step,
                at_ns=step.committed_ns,
                figures={
                    **_rewards(step, ended),
                    **_staleness(step, self.bound),
                    **{f"train/{name}": value for name, value in ended.fact.figures.items()},
                    **_rate(ended.fact),
                    **_ratios(self._contributed(ended)),
                    **_times(step, ended, now.sampled - before.sampled),
                    **self._worker_figures(),
                    **_counts("moves", before.moves, now.moves),
                    **_counts("groups", before.fates, now.fates),
                    **_invalid(now.errors - before.errors, now.errors),
                },
            )
        )

    def _add(self, row: Callable[[], FigureRow]) -> None:
        if self._skip:
            self._skip -= 1
        else:
            self._rows.append(row())

    def _sums(self) -> _Sums:
        return _Sums(
            sampled=self.lengths.total,
            moves=Counter(self.moves),
            fates=Counter(self.fates),
            errors=Counter(self.errors),
        )

    def _contributed(self, ended: StepEnded) -> Contributed:
        return contributed(ended.fact.step, self._contributions(ended.fact.contributions.sha256))

    def _worker_figures(self) -> dict[str, Figure]:
        """By facts and decisions alone."""
        present = self.account.present()
        return {
            "workers/present": float(len(present)),
            "workers/versions": float(len({one.hosted for one in present if one.hosted >= 0})),
            "workers/lost": float(sum(self.lost.values())),
        }


def _rewards(step: StepStats, ended: StepEnded) -> dict[str, Figure]:
    results = ended.results
    if not results:
        return {}
    valid = rewards_of(results)
    outside = sum(error_class(one.error) in INFRASTRUCTURE for one in results)
    found: dict[str, Figure] = {
        "reward/raw": math.fsum(one / len(results) for one in valid),
        "reward/invalid": 1 - len(valid) / len(results),
        "reward/infrastructure": outside / len(results),
    }
    found |= {f"reward/task/{name}": value for name, value in step.task_rewards}
    found |= {
        f"reward/part/{task and task + '/'}{name}": value
        for task, parts in step.parts.items()
        for name, value in parts.items()
    }
    return found if step.reward is None else {"reward/valid": step.reward, **found}


def _invalid(new: Counter[str], ever: Counter[str]) -> dict[str, Figure]:
    """By fault, and by class of those that have been there."""
    found: dict[str, Figure] = {
        f"invalid/{fault}": float(sum(of.values())) for fault, of in by_fault(new).items()
    }
    return found | {f"invalid/{fault_of(name)}/{name}": float(new[name]) for name in sorted(ever)}


def _staleness(step: StepStats, bound: int | None) -> dict[str, Figure]:
    found: dict[str, Figure] = {} if bound is None else {"staleness/bound": float(bound)}
    groups = sum(count for _, count in step.staleness)
    if groups:
        found["staleness/groups"] = Spread(step.staleness)
        found["staleness/mean"] = sum(value * count for value, count in step.staleness) / groups
        found["staleness/max"] = float(step.staleness[-1][0])
    return found


def _ratios(known: Contributed) -> dict[str, Figure]:
    found: dict[str, Figure] = {
        f"ratio/mismatch_staleness_{staleness}": value for staleness, value in known.mismatch
    }
    if known.effective is not None:
        found["ratio/effective_sample_ratio"] = known.effective
    return found


def _times(step: StepStats, ended: StepEnded, sampled: float) -> dict[str, Figure]:
    found: dict[str, Figure] = {
        "time/trainer_waited_s": step.waited_s,
        "time/training_s": step.training_s,
        "time/compute_s": ended.fact.compute_s,
    }
    if ended.fact.parts:
        found["time/ahead_s"] = step.ahead_s
        found["time/ahead_share"] = ahead_share(step.ahead_s, step.training_s)
    if step.seconds is None or step.seconds <= 0:
        return found
    trajectories = sum(len(group.trajectories) for group in ended.fact.groups)
    return {
        **found,
        "time/step_s": step.seconds,
        "throughput/trained_tokens_per_s": step.tokens / step.seconds,
        "throughput/trained_trajectories_per_s": trajectories / step.seconds,
        "throughput/sampled_tokens_per_s": sampled / step.seconds,
    }


def _rate(fact: StepCommitted) -> dict[str, Figure]:
    """The step's learning rate; a user's own trainer may have none."""
    rate = fact.settings.get("trainer.learning_rate")
    return {"train/learning_rate": rate} if isinstance(rate, float) else {}


def _counts(group: str, before: Counter[str], now: Counter[str]) -> dict[str, Figure]:
    return {f"{group}/{name}": float(now[name] - before[name]) for name in sorted(now)}
