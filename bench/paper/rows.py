"""Decides which published rows are simulated, on which hardware and under which paradigm, and how
a run of one is summed up: the mean step of its steady part, over seeds.

Every row runs on the hardware of one law (`scaling_model`), which was fitted to the synchronous and
one-step rows alone; DORA's and the partial rollout's rows are predictions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, Literal

from dora_pipe.bench.paper.lengths import EFFICIENCY
from dora_pipe.bench.paper.scaling_model import FITTED, GROUPS, MINUTE_S, SIBLINGS, ScalingModel
from dora_pipe.sim.modelled_cluster import Cluster, ClusterPlan, ClusterRun
from dora_pipe.sim.modelled_worker import WorkerSize
from dora_pipe.sim.paradigms import Pool, PoolPlan, settings_of
from dora_pipe.sim.paradigms_planner import LegacyFill, Planner, Production, Proportional

SEEDS: Final = (1, 2, 3)
STEPS: Final = 16
ROUND_S: Final = 2.0
"""Rounds are at least so far apart: of a step of ten minutes a fraction of a percent."""

Part = Literal["fitted", "predicted", "ours"]
PoolKind = Literal["", "partial", "interruptible", "roll-flash", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a paper prints, or what follows from it; None where it says nothing."""

    step_min: float | None = None
    exposed_min: float | None = None
    tokens_s: float | None = None
    staleness: Mapping[int, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A paradigm on a number of GPUs."""

    name: str
    gpus: int
    part: Part
    shared: bool = False
    """All GPUs generate, then all train; else the law's share of them trains."""
    max_staleness: int = 0
    in_flight_batches: float | None = None
    one_batch: bool = False
    planner: Callable[[], Planner] = Production
    parts: int = 1
    """In which a batch is taken."""
    elastic: bool = False
    """All GPUs generate, and those that train are of workers that sleep meanwhile."""
    pool: PoolKind = ""
    """A paradigm of `dora_pipe.sim.paradigms`; empty: production's planner."""
    published: Published = Published()

    def training(self, law: ScalingModel) -> int:
        """GPUs that train."""
        return self.gpus if self.shared else law.training(self.gpus)

    def generating(self, law: ScalingModel) -> int:
        """GPUs that generate."""
        return self.gpus if self.shared or self.elastic else self.gpus - self.training(law)

    def workers(self, law: ScalingModel) -> list[WorkerSize]:
        """Those of the GPUs that generate; the last are elastic."""
        found = law.workers(self.generating(law))
        sleep = len(law.workers(self.training(law))) if self.elastic else 0
        standalone = found[: len(found) - sleep]
        return [*standalone, *(replace(one, elastic=True) for one in found[len(standalone) :])]


PUBLISHED: Final[Mapping[tuple[str, int], Published]] = {
    ("sync", 64): Published(step_min=22.91, exposed_min=14.9, tokens_s=14_143),
    ("sync", 128): Published(step_min=20.23, exposed_min=14.77, tokens_s=16_070),
    ("one-step", 64): Published(step_min=22.94, exposed_min=7.57, tokens_s=14_141),
    ("one-step", 128): Published(step_min=14.0, tokens_s=23_200),
    ("partial", 64): Published(step_min=17.38, exposed_min=8.0, tokens_s=19_872),
    ("partial", 128): Published(step_min=13.95),
    ("dora", 64): Published(
        step_min=14.67, exposed_min=1.8, tokens_s=23_327, staleness={0: 0.20, 1: 0.66, 2: 0.14}
    ),
    ("dora", 128): Published(
        step_min=10.46, exposed_min=2.5, tokens_s=34_135, staleness={0: 0.20, 1: 0.66, 2: 0.14}
    ),
}

PARTIAL_SURPLUS: Final = 1.25
"""Groups in flight of the partial rollout, in batches: more than one, not published."""
PARTS: Final = 8
"""`trainer.parts` of the rows with parts."""


def published_rows(gpus: int) -> Iterator[Scenario]:
    """The four published paradigms; DORA with its own Algorithm 1, with production's planner, and
    with its parts."""
    known = {name: PUBLISHED[name, gpus] for name, size in PUBLISHED if size == gpus}
    yield Scenario(name="sync", gpus=gpus, part="fitted", shared=True, published=known["sync"])
    yield Scenario(
        name="one-step",
        gpus=gpus,
        part="fitted",
        max_staleness=1,
        one_batch=True,
        published=known["one-step"],
    )
    yield Scenario(
        name="partial",
        gpus=gpus,
        part="predicted",
        shared=True,
        pool="partial",
        in_flight_batches=PARTIAL_SURPLUS,
        published=known["partial"],
    )
    for name, planner in (("dora", Production), ("dora, Algorithm 1", Proportional)):
        yield Scenario(
            name=name,
            gpus=gpus,
            part="predicted",
            max_staleness=2,
            in_flight_batches=2.0,
            planner=planner,
            published=known["dora"],
        )
    yield parted_row(gpus, PARTS)


def parted_row(gpus: int, parts: int) -> Scenario:
    """Production's planner with the bound and C of the row `dora`, and parts."""
    return Scenario(
        name=f"dora, {parts} parts",
        gpus=gpus,
        part="ours",
        max_staleness=2,
        in_flight_batches=2.0,
        parts=parts,
        published=PUBLISHED["dora", gpus],
    )


def sweep_rows(gpus: int) -> Iterator[Scenario]:
    """The knob that no paper publishes: groups in flight, for DORA and for the partial rollout."""
    swept: tuple[tuple[str, Callable[[], Planner], tuple[float, ...]], ...] = (
        ("dora", Production, (2.0, 2.25, 2.5, 3.0)),
        ("dora, Algorithm 1", Proportional, (2.0, 2.25)),
    )
    for name, planner, sizes in swept:
        for batches in sizes:
            yield Scenario(
                name=f"{name}, C {batches:g}",
                gpus=gpus,
                part="ours",
                max_staleness=2,
                in_flight_batches=batches,
                planner=planner,
            )
    for batches in (1.1, 1.25, 1.5):
        yield Scenario(
            name=f"partial, surplus {batches:g}",
            gpus=gpus,
            part="ours",
            shared=True,
            pool="partial",
            in_flight_batches=batches,
        )


def other_rows(gpus: int) -> Iterator[Scenario]:
    """What else the same hardware could do."""
    yield Scenario(
        name="eta 1, C 2", gpus=gpus, part="ours", max_staleness=1, in_flight_batches=2.0
    )
    yield Scenario(
        name="legacy fill, C 2",
        gpus=gpus,
        part="ours",
        max_staleness=2,
        in_flight_batches=2.0,
        planner=LegacyFill,
    )
    pools: tuple[PoolKind, ...] = ("interruptible", "drop", "roll-flash")
    for pool in pools:
        yield Scenario(
            name=pool,
            gpus=gpus,
            part="ours",
            pool=pool,
            max_staleness=2,
            in_flight_batches=3.0 if pool != "interruptible" else 2.0,
        )


def elastic_rows(gpus: int, batches: Sequence[float]) -> Iterator[Scenario]:
    """GPUs that train alone beside GPUs that train and, between steps, generate."""
    for elastic in (False, True):
        for many in batches:
            yield Scenario(
                name="elastic" if elastic else "apart",
                gpus=gpus,
                part="ours",
                max_staleness=2,
                in_flight_batches=many,
                elastic=elastic,
            )


WARM_STEPS: Final = 4
"""The first steps of a run are not counted: everything starts at once."""
END_STEPS: Final = 3
"""Nor are the last: fewer and fewer groups are in flight, because the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The steady part of one run; minutes."""

    step_min: float
    train_min: float
    tokens_s: float
    staleness: Mapping[int, float]
    """Share of groups (or samples) by staleness."""
    slots_used: float
    """Share of slots with a request, over the whole run."""
    moves_share: float
    """Moves per request."""
    loads_step: float
    """Weights loaded per step and worker."""

    @property
    def exposed_min(self) -> float:
        """Time of a step in which nobody trains: the published "rollout-only" time."""
        return self.step_min - self.train_min

    @property
    def staleness_mean(self) -> float:
        """Mean over groups."""
        return sum(staleness * share for staleness, share in self.staleness.items())


def figures_of_run(run: ClusterRun) -> Figures:
    """Sum up one run of more than `WARM_STEPS + END_STEPS` steps."""
    spans = run.spans
    assert len(spans) > WARM_STEPS + END_STEPS, f"{len(spans)} steps are too few"
    steady = spans[WARM_STEPS:-END_STEPS]
    wall_s = steady[-1].committed_s - spans[WARM_STEPS - 1].committed_s
    staleness: Counter[int] = Counter()
    for span in steady:
        staleness.update(dict(span.staleness))
    return Figures(
        step_min=wall_s / len(steady) / MINUTE_S,
        train_min=sum(one.committed_s - one.taken_s + one.ahead_s for one in steady)
        / len(steady)
        / MINUTE_S,
        tokens_s=sum(one.tokens for one in steady) / wall_s,
        staleness={one: staleness[one] / staleness.total() for one in sorted(staleness)},
        slots_used=run.slot_s / run.slots / run.wall_s,
        moves_share=run.moves / max(1, run.requests),
        loads_step=run.loads / run.workers / len(spans),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """The same row under several seeds."""

    runs: Sequence[Figures]

    def mean(self, what: str) -> float:
        """Of one of the figures, over seeds."""
        return sum(self._each(what)) / len(self.runs)

    def spread(self, what: str) -> float:
        """Half of the distance between the largest and the smallest."""
        found = self._each(what)
        return (max(found) - min(found)) / 2

    def _each(self, what: str) -> list[float]:
        return [getattr(one, what) for one in self.runs]

    def staleness(self) -> dict[int, float]:
        """Mean histogram."""
        found: dict[int, float] = {}
        for one in self.runs:
            for key, share in one.staleness.items():
                found[key] = found.get(key, 0.0) + share
        return {key: found[key] / len(self.runs) for key in sorted(found)}


def overlap(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Shared mass of two histograms, 1 for equal ones."""
    return sum(min(one.get(key, 0.0), other.get(key, 0.0)) for key in {*one, *other})


def simulate(
    scenario: Scenario,
    *,
    law: ScalingModel = FITTED,
    seed: int,
    steps: int = STEPS,
    per_step: int = GROUPS,
    lengths: Callable[[int], Sequence[int]] | None = None,
) -> Figures:
    """One run of a scenario; `lengths` of the siblings by ordinal, those of the checkpoint else."""
    drawn = cache(lambda one: EFFICIENCY.draw(seed=seed, ordinal=one, size=SIBLINGS))
    common: dict[str, Any] = {
        "workers": scenario.workers(law),
        "rates": law.rates(),
        "trainer": law.trainer(scenario.training(law)),
        "lengths": lengths or drawn,
        "group_size": SIBLINGS,
        "per_step": per_step,
        "steps": steps,
    }
    if scenario.pool:
        assert scenario.in_flight_batches is not None
        settings = settings_of(
            scenario.pool,
            batches=scenario.in_flight_batches,
            per_step=per_step,
            group_size=SIBLINGS,
            bound=scenario.max_staleness,
        )
        pool = PoolPlan(**common, **settings, shared=scenario.shared, parts=scenario.parts)
        return figures_of_run(Pool(pool).run())
    plan = ClusterPlan(
        **common,
        parts=scenario.parts,
        max_staleness=scenario.max_staleness,
        in_flight_batches=scenario.in_flight_batches,
        one_batch=scenario.one_batch,
        planner=scenario.planner(),
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
    """A scenario under several seeds."""
    return Seeds(runs=[simulate(scenario, law=law, seed=seed, steps=steps) for seed in seeds])
