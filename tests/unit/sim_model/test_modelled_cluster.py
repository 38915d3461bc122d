"""Production's planner over modelled hardware, and the paradigms beside it."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from dora_pipe.bench.studies.paper.lengths import Lengths
from dora_pipe.sim.modelled_cluster import Cluster, ClusterPlan, ClusterRun
from dora_pipe.sim.modelled_worker import EngineRates, TrainerRates, WorkerSize

LENGTHS = Lengths(mu=5.0, sigma=1.2, cap=2000)
RATES = EngineRates(tau_s=0.02, load_s=1.0)


def rollout_units(
    groups: Sequence[Sequence[int]], *, workers: int, slots: int, rise: float
) -> float:
    """Length of one synchronous rollout in units of `tau_s`; first come, first served.

    Requests go to whichever worker has a slot free first; each worker runs at its own pace.
    """
    waiting = iter([float(length) for group in groups for length in group])
    heaps: list[list[float]] = [[] for _ in range(workers)]
    served = [0.0] * workers
    for number, length in zip(range(workers * slots), waiting, strict=False):
        heapq.heappush(heaps[number % workers], length)

    def due(now: float, worker: int) -> float:
        left = heaps[worker][0] - served[worker]
        return now + left * (1.0 + rise * len(heaps[worker]) / slots)

    events = [(due(0.0, worker), worker) for worker in range(workers) if heaps[worker]]
    heapq.heapify(events)
    now = 0.0
    while events:
        now, worker = events[0]
        heap = heaps[worker]
        served[worker] = heap[0]
        following = next(waiting, None)
        if following is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, served[worker] + following)
        if heap:
            heapq.heapreplace(events, (due(now, worker), worker))
        else:
            heapq.heappop(events)
    return now


def draw(ordinal: int) -> tuple[int, ...]:
    """The lengths of a group of four."""
    return LENGTHS.draw(seed=1, ordinal=ordinal, size=4)


def workers(count: int, slots: int = 8) -> list[WorkerSize]:
    return [WorkerSize(name=f"w{one}", slots=slots, prefetch=1) for one in range(count)]


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


def test_a_synchronous_step_is_a_rollout_and_then_a_training() -> None:
    run = Cluster(plan(max_staleness=0, steps=4, round_s=0.01)).run()
    for number, span in enumerate(run.spans):
        groups = [draw(ordinal) for ordinal in range(16 * number, 16 * (number + 1))]
        rollout_s = rollout_units(groups, workers=4, slots=8, rise=0.0) * RATES.tau_s + RATES.load_s
        before_s = run.spans[number - 1].committed_s if number else 0.0
        assert span.taken_s - before_s == pytest.approx(rollout_s, rel=0.12)
        assert span.committed_s - span.taken_s == pytest.approx(6.0)


def test_one_batch_at_a_time_trains_everything_one_version_late() -> None:
    run = Cluster(plan(max_staleness=1, one_batch=True)).run()
    assert staleness_of(run) <= {0, 1}
    assert dict(run.spans[3].staleness) == {1: 16}


@pytest.mark.parametrize("eta", [0, 1, 2, 3])
def test_a_run_ends_and_keeps_the_bound(eta: int) -> None:
    run = Cluster(plan(max_staleness=eta, in_flight_batches=eta + 1.0)).run()
    assert len(run.spans) == 8
    assert max(staleness_of(run)) <= eta
    assert run.slot_s <= run.slots * run.wall_s


def test_equal_plans_run_equally() -> None:
    assert Cluster(plan()).run() == Cluster(plan()).run()


def test_a_step_never_beats_the_limit() -> None:
    run = Cluster(plan(in_flight_batches=3.0, max_staleness=3, steps=12)).run()
    tokens = sum(span.tokens for span in run.spans)
    assert run.wall_s >= tokens * RATES.tau_s / run.slots
    assert run.wall_s >= 12 * 6.0


def mean_staleness(run: ClusterRun) -> float:
    """Over trained groups."""
    found = [pair for span in run.spans for pair in span.staleness]
    return sum(key * count for key, count in found) / sum(count for _, count in found)


@pytest.mark.parametrize(("count", "slots", "train_s"), [(4, 24, 12.0), (8, 12, 15.0)])
def test_an_automatic_c_wins_what_a_larger_one_wins_and_is_not_as_stale(
    count: int, slots: int, train_s: float
) -> None:
    sizes, trainer = workers(count, slots), TrainerRates(fixed_s=train_s)
    small, large, automatic = (
        Cluster(plan(workers=sizes, trainer=trainer, steps=30, in_flight_batches=one)).run()
        for one in (2.0, 3.0, "auto")
    )
    won_s = small.wall_s - large.wall_s
    assert won_s > 0
    assert small.wall_s - automatic.wall_s > 0.9 * won_s
    assert mean_staleness(automatic) < mean_staleness(large) - 0.5


@pytest.mark.parametrize(("count", "train_s"), [(4, 60.0), (2, 6.0)])
def test_an_automatic_c_stays_where_training_or_generation_alone_is_the_limit(
    count: int, train_s: float
) -> None:
    trainer = TrainerRates(fixed_s=train_s)
    cluster = Cluster(
        plan(workers=workers(count), trainer=trainer, steps=20, in_flight_batches="auto")
    )
    cluster.run()
    assert cluster.state.in_flight_batches == 2.0


def test_parts_are_computed_while_the_last_groups_are_generated() -> None:
    slow = TrainerRates(fixed_s=0.5, token_s=6.0 / sum(sum(draw(one)) for one in range(16)))
    whole, parted = (
        Cluster(plan(trainer=slow, max_staleness=0, parts=parts)).run() for parts in (1, 8)
    )
    assert sum(span.tokens for span in parted.spans) == sum(span.tokens for span in whole.spans)
    saved_s = (whole.wall_s - parted.wall_s) / len(whole.spans)
    assert 2.0 < saved_s < 6.0 * 7 / 8
    for one, other in zip(whole.spans, parted.spans, strict=True):
        trained_s = other.committed_s - other.taken_s + other.ahead_s
        assert trained_s == pytest.approx(one.committed_s - one.taken_s, abs=1e-3)
        assert one.ahead_s == 0.0
    assert sum(span.ahead_s for span in parted.spans) > 2.0 * len(parted.spans)


@pytest.mark.parametrize("declares", [("moves",), ()])
def test_elastic_workers_generate_between_steps(declares: tuple[str, ...]) -> None:
    """They win time against two workers alone, and cost time against four that never sleep."""
    elastic = [replace(one, elastic=number > 1) for number, one in enumerate(workers(4))]
    walls = [
        Cluster(plan(workers=some, declares=declares)).run().wall_s
        for some in (workers(4), elastic, workers(2))
    ]
    assert walls == sorted(walls) and len(set(walls)) == 3


def test_no_worker_runs_anything_in_a_step_where_all_are_elastic() -> None:
    every = [replace(one, elastic=True) for one in workers(4)]
    run = Cluster(plan(workers=every, steps=4)).run()
    trained_s = sum(span.committed_s - span.taken_s for span in run.spans)
    assert run.busy_s <= 4 * (run.wall_s - trained_s) + 1e-6
    assert max(staleness_of(run)) <= 2


def test_filtered_groups_are_replaced() -> None:
    run = Cluster(
        plan(
            reward=lambda ordinal, sibling: float(ordinal % 3 > 0 and sibling % 2),
            filter_zero_advantage=True,
        )
    ).run()
    assert len(run.spans) == 8
    assert run.requests > 8 * 16 * 4 * 1.3
