"""Tests of the production planner on modeled hardware, and of other paradigms."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.bench.studies.paper.cluster import Cluster, ClusterPlan, ClusterRun
from dora_pipe.bench.studies.paper.hardware import EngineRates, TrainerRates, WorkerSize
from dora_pipe.bench.studies.paper.lengths import Lengths

LENGTHS = Lengths(mu=5.0, sigma=1.2, cap=2000)
RATES = EngineRates(tau_s=0.02, load_s=1.0)


def draw(ordinal: int) -> tuple[int, ...]:
    return LENGTHS.draw(seed=1, ordinal=ordinal, size=4)


def workers(count: int, slots: int = 8) -> list[WorkerSize]:
    return [WorkerSize(name=f"w{index}", slots=slots, prefetch=1) for index in range(count)]


def plan(**changes: Any) -> ClusterPlan:
    plain: dict[str, Any] = {
        "workers": workers(4),
        "rates": RATES,
        "trainer": TrainerRates(fixed_s=6.0),
        "lengths": draw,
        "group_size": 4,
        "per_step": 16,
        "steps": 8,
        "max_staleness": 2,
        "round_s": 0.1,
    }
    return ClusterPlan(**(plain | changes))


def staleness_of(run: ClusterRun) -> set[int]:
    return {key for span in run.spans for key, _ in span.staleness}


@pytest.mark.parametrize("eta", [0, 1, 2, 3])
def test_a_run_ends_and_keeps_the_bound(eta: int) -> None:
    run = Cluster(plan(max_staleness=eta, async_batches=eta + 1.0)).run()
    assert len(run.spans) == 8
    assert max(staleness_of(run)) <= eta
    assert run.slot_s <= run.slots * run.wall_s


def mean_staleness(run: ClusterRun) -> float:
    spans = [pair for span in run.spans for pair in span.staleness]
    return sum(key * count for key, count in spans) / sum(count for _, count in spans)


@pytest.mark.parametrize(("count", "slots", "train_s"), [(4, 24, 12.0), (8, 12, 15.0)])
def test_an_automatic_c_wins_what_a_larger_one_wins_and_is_not_as_stale(
    count: int, slots: int, train_s: float
) -> None:
    sizes, trainer = workers(count, slots), TrainerRates(fixed_s=train_s)
    small, large, automatic = (
        Cluster(plan(workers=sizes, trainer=trainer, steps=30, async_batches=entry)).run()
        for entry in (2.0, 3.0, "auto")
    )
    won_s = small.wall_s - large.wall_s
    assert won_s > 0
    assert small.wall_s - automatic.wall_s > 0.9 * won_s
    assert mean_staleness(automatic) < mean_staleness(large) - 0.5
