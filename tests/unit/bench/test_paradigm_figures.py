"""Ratios of paradigms: pairs with the same seed, an interval, and what it does not tell apart."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.studies.entrants import (
    CHOOSING_FROM,
    ENTRANTS,
    better_half,
    on_seeds,
    overrides_of,
    reported,
    settings_of,
)
from dora_pipe.bench.studies.paradigms import (
    Cell,
    ParadigmRun,
    compare,
    crossing,
    interval_95,
    isotonic,
    quickness,
    settled,
)

RATES = (3e-4, 1e-4)


def run(entrant: str, seed: int, samples_per_s: float) -> ParadigmRun:
    """A run of which only its speed matters."""
    own = next(settings_of(entrant, RATES))
    return of_cell(msgspec.structs.replace(own, seed=seed), samples_per_s=samples_per_s)


def of_cell(
    cell: Cell, *, samples_per_s: float = 1.0, target_s: float | None = None
) -> ParadigmRun:
    return ParadigmRun(
        setting="s",
        cell=cell,
        steps=48,
        seconds=60.0,
        samples_per_s=samples_per_s,
        target_s=target_s,
        course=(),
        reward=0.9,
        sampling=0.5,
        slots_busy=0.5,
        training=0.5,
        staleness=1.0,
        token_staleness=1.0,
        moves=0,
        mixed=0.0,
    )


def test_two_seeds_twice_as_fast_are_not_told_apart_from_one() -> None:
    runs = [run("sync", 0, 100.0), run("dora", 0, 202.0)]
    runs += [run("sync", 1, 100.0), run("dora", 1, 231.0)]
    found = {one.entrant: one for one in compare(runs, lambda one: one.samples_per_s, base="sync")}
    dora = found["dora"]
    assert (dora.low, dora.high) == pytest.approx((2.02, 2.31))
    assert dora.seeds == 2
    assert dora.ratio == pytest.approx((2.02 * 2.31) ** 0.5)
    assert dora.interval is not None
    assert dora.interval == pytest.approx((0.92, 5.06), abs=0.01)
    assert not dora.told_apart


def test_eight_steady_seeds_are_told_apart() -> None:
    runs = [run("sync", seed, 100.0 + seed) for seed in range(8)]
    runs += [run("dora", seed, 200.0 + 3 * seed) for seed in range(8)]
    found = compare(runs, lambda one: one.samples_per_s, base="sync")
    assert [one.told_apart for one in found] == [False, True]


def test_runs_without_a_partner_of_their_seed_are_left_out() -> None:
    runs = [run("sync", 0, 100.0), run("dora", 1, 200.0)]
    assert [one.entrant for one in compare(runs, lambda one: one.samples_per_s, base="sync")] == [
        "sync"
    ]


def test_one_value_has_no_interval() -> None:
    assert interval_95([2.0]) is None


def test_a_course_crosses_its_target_between_two_evaluations() -> None:
    assert crossing([(0.0, 0.4), (10.0, 0.8)], 0.6) == pytest.approx(5.0)
    assert crossing([(0.0, 0.4), (10.0, 0.5)], 0.6) is None


def test_an_evaluation_that_is_lucky_is_pooled_with_the_worse_ones_behind_it() -> None:
    course = [(0.0, 0.4), (1.0, 0.9), (2.0, 0.5), (3.0, 0.7), (4.0, 0.8)]
    rewards = [reward for _, reward in isotonic(course)]
    assert rewards == pytest.approx([0.4, 0.7, 0.7, 0.7, 0.8])
    assert crossing(course, 0.75) < 1.0  # type: ignore[operator]
    assert crossing(isotonic(course), 0.75) == pytest.approx(3.5)


@pytest.mark.parametrize("name", ENTRANTS)
def test_grids_are_as_large_for_every_entrant_and_begin_with_its_own_setting(name: str) -> None:
    grid = list(settings_of(name, RATES))
    assert len(grid) == len(set(grid)) == 4
    assert (grid[0].learning_rate, grid[0].batches) == (RATES[0], ENTRANTS[name].batches[0])


def test_settings_are_chosen_on_other_seeds_than_those_that_are_reported() -> None:
    grid = list(settings_of("dora", RATES))
    choosing = [one for seed in range(2) for one in on_seeds(grid, seed)]
    cells = reported([next(settings_of("dora", RATES)), next(settings_of("sync", RATES))], 3)
    assert len(choosing) == len(set(choosing)) == 8
    assert {one.seed for one in choosing} == {CHOOSING_FROM, CHOOSING_FROM + 1}
    assert {one.seed for one in cells} == {0, 1, 2}
    assert [one.entrant for one in cells] == ["dora", "sync", "sync", "dora", "dora", "sync"]


def test_the_half_is_kept_that_reaches_the_target_first_on_average_and_always() -> None:
    grid = list(settings_of("dora", RATES))
    times = {0: (10.0, 50.0), 1: (5.0, None), 2: (20.0, 30.0), 3: (None, None)}
    runs = [
        of_cell(msgspec.structs.replace(grid[at], seed=1000 + seed), target_s=target_s)
        for at, of_setting in times.items()
        for seed, target_s in enumerate(of_setting)
    ]
    assert better_half(grid, runs) == [grid[2], grid[0]]
    assert better_half(grid[:3], runs[:6]) == [grid[2], grid[0]]
    assert better_half(grid, [])[0] == grid[0]


def test_what_a_cell_sets_is_told_as_overrides() -> None:
    cell = msgspec.structs.replace(list(settings_of("sync", RATES))[1], seed=7)
    assert overrides_of(cell) == [
        "staleness.in_flight_batches=1.0",
        "trainer.learning_rate=0.0003",
        "groups.filter_zero_advantage=false",
        "run.seed=7",
        "staleness.max_staleness=0",
        "staleness.interruptible=false",
        "trainer.parts=1",
    ]


def test_a_run_that_never_came_to_the_target_counts_at_its_end() -> None:
    cell = run("dora", 0, 1.0).cell
    assert quickness(of_cell(cell, target_s=20.0)) == 1 / 20
    assert quickness(of_cell(cell, target_s=None)) == 1 / 60
    assert quickness(of_cell(cell, target_s=0.0)) is None


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 1))
def test_a_run_that_has_settled_at_its_target_has_come_to_it(
    rewards: list[float], target: float
) -> None:
    course = [(float(at), reward) for at, reward in enumerate(rewards)]
    if settled(rewards, target):
        assert crossing(isotonic(course), target - 1e-12) is not None
    assert not settled([*rewards, target + 0.1, target - 0.1], target)
    assert not settled([target], target)
    assert settled([*rewards, target, target], target)
