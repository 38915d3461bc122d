"""Ratios of paradigms: pairs with the same seed, an interval, and what it does not tell apart."""

from __future__ import annotations

import pytest

from dora_pipe.bench.paradigms import ParadigmRun, compare, crossing, interval_95


def run(paradigm: str, seed: int, samples_per_s: float) -> ParadigmRun:
    """A run of which only its speed matters."""
    return ParadigmRun(
        paradigm=paradigm,
        seed=seed,
        steps=48,
        seconds=60.0,
        samples_per_s=samples_per_s,
        target_s=None,
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
    found = {one.paradigm: one for one in compare(runs, lambda one: one.samples_per_s, base="sync")}
    dora = found["dora"]
    assert (dora.seeds, dora.low, dora.high) == (2, 2.02, 2.31)
    assert dora.interval is not None
    assert dora.interval[0] == pytest.approx(0.32, abs=0.01)
    assert dora.interval[1] == pytest.approx(4.01, abs=0.01)
    assert not dora.told_apart


def test_eight_steady_seeds_are_told_apart() -> None:
    runs = [run("sync", seed, 100.0 + seed) for seed in range(8)]
    runs += [run("dora", seed, 200.0 + 3 * seed) for seed in range(8)]
    found = compare(runs, lambda one: one.samples_per_s, base="sync")
    assert [one.told_apart for one in found] == [False, True]


def test_runs_without_a_partner_of_their_seed_are_left_out() -> None:
    runs = [run("sync", 0, 100.0), run("dora", 1, 200.0)]
    assert [one.paradigm for one in compare(runs, lambda one: one.samples_per_s, base="sync")] == [
        "sync"
    ]


def test_one_value_has_no_interval() -> None:
    assert interval_95([2.0]) is None


def test_a_course_crosses_its_target_between_two_evaluations() -> None:
    assert crossing([(0.0, 0.4), (10.0, 0.8)], 0.6) == pytest.approx(5.0)
    assert crossing([(0.0, 0.4), (10.0, 0.5)], 0.6) is None
