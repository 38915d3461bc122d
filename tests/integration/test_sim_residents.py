"""Seeds of the swarm whose workers host several versions at once: no violation, and few moves."""

from __future__ import annotations

import logging

import pytest

from dora_pipe.sim.draw import draw
from dora_pipe.sim.swarm import play

CHUNK = 12


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("chunk", range(5))
def test_seeds_with_such_workers_hold(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        played = play(seed, resident=True)
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
    played = play(3, resident=True)
    assert played.again == "dora-pipe sim --seed 3 --resident"
    assert play(3).again == "dora-pipe sim --seed 3"


@pytest.mark.pure
@pytest.mark.slow
def test_five_hundred_seeds_with_such_workers_hold() -> None:
    broken = [
        played.line for seed in range(1000, 1500) if not (played := play(seed, resident=True)).holds
    ]
    assert broken == []
