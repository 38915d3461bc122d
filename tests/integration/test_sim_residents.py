"""Seeds of the swarm whose workers host several versions at once: no violation, and few moves."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from dora_pipe.sim.scenario import Form, draw
from dora_pipe.sim.seed_runner import SeedRun, run_seed

FIRST, MORE = range(6), (*range(6, 60), *range(1000, 1066))
SHARES = 4
"""Of the longest test, so that nobody waits for it alone."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def broken(seeds: Iterable[int], form: Form = "swarm") -> list[str]:
    """What those seeds say that do not hold."""
    runs = (SeedRun(draw(seed, resident=True, form=form)).run() for seed in seeds)
    return [one.line for one in runs if not one.holds]


def test_seeds_with_such_workers_hold() -> None:
    assert broken(FIRST) == []


def test_version_that_was_dropped_is_not_hosted_again_by_a_fact_that_is_said_twice() -> None:
    assert broken([1313], form="long") == []


def test_workers_that_are_drained_leave_although_a_cancelled_reward_hangs_for_ever() -> None:
    assert broken([1211], form="long") == []


def test_such_workers_change_nothing_else_of_a_seed() -> None:
    for seed in range(50):
        plain, several = draw(seed, form="plain"), draw(seed, form="plain", resident=True)
        assert several.config == plain.config
        assert several.faults == plain.faults
        assert {one.versions for one in plain.workers} == {1}
        assert [one.slots for one in several.workers] == [one.slots for one in plain.workers]
    drawn = [draw(seed, resident=True) for seed in range(50)]
    assert {one.versions for each in drawn for one in each.workers} == {1, 2, 3, 4, 5}


def test_broken_seed_says_how_it_is_played_again() -> None:
    played = run_seed(3, resident=True)
    assert played.again == "python -m sim --seed 3 --resident"
    assert run_seed(3).again == "python -m sim --seed 3"


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_more_seeds_with_such_workers_hold(share: int) -> None:
    assert broken(MORE[share::SHARES]) == []
