"""Published rows on modeled hardware, and summaries.

The law was fitted to the synchronous and one-step rows; DORA's rows are predictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

from dora_pipe.bench.studies.paper.cluster import Cluster, ClusterPlan, ClusterRun
from dora_pipe.bench.studies.paper.hardware import WorkerSize
from dora_pipe.bench.studies.paper.lengths import EFFICIENCY
from dora_pipe.bench.studies.paper.scaling_model import (
    FITTED,
    GROUPS,
    MINUTE_S,
    SAMPLES,
    ScalingModel,
)

SEEDS: Final = (1, 2, 3)
STEPS: Final = 16
ROUND_S: Final = 2.0
"""A fraction of a percent of a step."""

Part = Literal["fitted", "predicted", "ours"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Published values; None if unknown."""

    step_min: float | None = None
    exposed_min: float | None = None
    tokens_s: float | None = None
    staleness: Mapping[int, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Paradigm on a number of GPUs."""

    name: str
    gpus: int
    part: Part
    shared: bool = False
    """Whether all GPUs alternate; otherwise the law's share trains."""
    max_staleness: int = 0
    async_batches: float | None = None
    one_batch: bool = False
    parts: int = 1
    published: Published = Published()

    def training(self, law: ScalingModel) -> int:
        return self.gpus if self.shared else law.training(self.gpus)

    def generating(self, law: ScalingModel) -> int:
        return self.gpus if self.shared else self.gpus - self.training(law)

    def workers(self, law: ScalingModel) -> list[WorkerSize]:
        return law.workers(self.generating(law))


PUBLISHED: Final[Mapping[tuple[str, int], Published]] = {
    ("sync", 64): Published(step_min=22.91, exposed_min=14.9, tokens_s=14_143),
    ("sync", 128): Published(step_min=20.23, exposed_min=14.77, tokens_s=16_070),
    ("one-step", 64): Published(step_min=22.94, exposed_min=7.57, tokens_s=14_141),
    ("one-step", 128): Published(step_min=14.0, tokens_s=23_200),
    ("dora", 64): Published(
        step_min=14.67, exposed_min=1.8, tokens_s=23_327, staleness={0: 0.20, 1: 0.66, 2: 0.14}
    ),
    ("dora", 128): Published(
        step_min=10.46, exposed_min=2.5, tokens_s=34_135, staleness={0: 0.20, 1: 0.66, 2: 0.14}
    ),
}

PARTS: Final = 8
"""`trainer.batch_parts` of rows with parts."""


def published_rows(gpus: int) -> Iterator[Scenario]:
    """Yield the paradigms, and DORA with parts."""
    published = {name: PUBLISHED[name, gpus] for name, size in PUBLISHED if size == gpus}
    yield Scenario(name="sync", gpus=gpus, part="fitted", shared=True, published=published["sync"])
    yield Scenario(
        name="one-step",
        gpus=gpus,
        part="fitted",
        max_staleness=1,
        one_batch=True,
        published=published["one-step"],
    )
    yield Scenario(
        name="dora",
        gpus=gpus,
        part="predicted",
        max_staleness=2,
        async_batches=2.0,
        published=published["dora"],
    )
    yield parted_row(gpus, PARTS)


def parted_row(gpus: int, parts: int) -> Scenario:
    """Return the row `dora` with parts."""
    return Scenario(
        name=f"dora, {parts} parts",
        gpus=gpus,
        part="ours",
        max_staleness=2,
        async_batches=2.0,
        parts=parts,
        published=PUBLISHED["dora", gpus],
    )


WARM_STEPS: Final = 4
"""Initial steps not counted: everything starts at once."""
END_STEPS: Final = 3
"""Final steps not counted: fewer groups are in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Steady part; minutes."""

    step_min: float
    train_min: float
    tokens_s: float
    staleness: Mapping[int, float]
    """Shares by staleness."""
    slots_used: float
    """Share over the run."""

    @property
    def exposed_min(self) -> float:
        """Return the published "rollout-only" time of a step."""
        return self.step_min - self.train_min


def figures_of_run(run: ClusterRun) -> Figures:
    spans = run.spans
    assert len(spans) > WARM_STEPS + END_STEPS, f"{len(spans)} steps are too few"
    steady = spans[WARM_STEPS:-END_STEPS]
    wall_s = steady[-1].committed_s - spans[WARM_STEPS - 1].committed_s
    staleness: Counter[int] = Counter()
    for span in steady:
        staleness.update(dict(span.staleness))
    return Figures(
        step_min=wall_s / len(steady) / MINUTE_S,
        train_min=sum(step.committed_s - step.taken_s + step.early_s for step in steady)
        / len(steady)
        / MINUTE_S,
        tokens_s=sum(step.tokens for step in steady) / wall_s,
        staleness={lag: staleness[lag] / staleness.total() for lag in sorted(staleness)},
        slots_used=run.slot_s / run.slots / run.wall_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    runs: Sequence[Figures]

    def mean(self, what: str) -> float:
        return sum(self._each(what)) / len(self.runs)

    def spread(self, what: str) -> float:
        """Return half the range."""
        values = self._each(what)
        return (max(values) - min(values)) / 2

    def _each(self, what: str) -> list[float]:
        return [getattr(run, what) for run in self.runs]

    def staleness(self) -> dict[int, float]:
        """Return the mean histogram."""
        shares: dict[int, float] = {}
        for run in self.runs:
            for key, share in run.staleness.items():
                shares[key] = shares.get(key, 0.0) + share
        return {key: shares[key] / len(self.runs) for key in sorted(shares)}


def overlap(shares: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the common mass of histograms."""
    return sum(min(shares.get(key, 0.0), other.get(key, 0.0)) for key in {*shares, *other})


def simulate(
    scenario: Scenario,
    *,
    law: ScalingModel = FITTED,
    seed: int,
    steps: int = STEPS,
    per_step: int = GROUPS,
) -> Figures:
    drawn = cache(lambda ordinal: EFFICIENCY.draw(seed=seed, ordinal=ordinal, size=SAMPLES))
    plan = ClusterPlan(
        workers=scenario.workers(law),
        rates=law.rates(),
        trainer=law.trainer(scenario.training(law)),
        lengths=drawn,
        group_size=SAMPLES,
        per_step=per_step,
        steps=steps,
        parts=scenario.parts,
        max_staleness=scenario.max_staleness,
        async_batches=scenario.async_batches,
        one_batch=scenario.one_batch,
        round_s=ROUND_S,
    )
    return figures_of_run(Cluster(plan).run())


def simulate_seeds(
    scenario: Scenario,
    *,
    law: ScalingModel = FITTED,
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
) -> Seeds:
    return Seeds(runs=[simulate(scenario, law=law, seed=seed, steps=steps) for seed in seeds])
