"""Seeds of the swarm whose workers host several versions at once: no violation, and few moves."""

from __future__ import annotations

import logging

import pytest

from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import run_seed

CHUNK = 12


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("chunk", range(5))
def test_seeds_with_such_workers_hold(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        played = run_seed(seed, resident=True)
        assert played.holds, played.line


def test_version_that_was_dropped_is_not_hosted_again_by_a_fact_that_is_said_twice() -> None:
    played = run_seed(1313, resident=True)
    assert played.holds, played.line


def test_such_workers_change_nothing_else_of_a_seed() -> None:
    for seed in range(50):
        plain, several = draw(seed), draw(seed, resident=True)
        assert several.config == plain.config
        assert several.faults == plain.faults
        assert {one.versions for one in plain.workers} == {1}
        assert [one.slots for one in several.workers] == [one.slots for one in plain.workers]
    drawn = [draw(seed, resident=True) for seed in range(50)]
    assert {one.versions for each in drawn for one in each.workers} == {1, 2, 3, 4, 5}


def test_broken_seed_says_how_it_is_played_again() -> None:
    played = run_seed(3, resident=True)
    assert played.again == "dora-pipe sim --seed 3 --resident"
    assert run_seed(3).again == "dora-pipe sim --seed 3"


@pytest.mark.pure
@pytest.mark.slow
def test_five_hundred_seeds_with_such_workers_hold() -> None:
    broken = [
        played.line
        for seed in range(1000, 1500)
        if not (played := run_seed(seed, resident=True)).holds
    ]
    assert broken == []
