"""200 seeds of the swarm: no violation, and each has enough in it to mean something."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from dora_pipe.sim.coverage import Coverage
from dora_pipe.sim.draw import draw
from dora_pipe.sim.swarm import Swarm, play

CHUNK = 20
EVENTS_MIN, FAULTS_MIN, STEPS_MIN = 2000, 3, 10


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("chunk", range(10))
def test_seeds_hold(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        played = play(seed)
        assert played.holds, played.line
        assert played.events >= EVENTS_MIN, seed
        assert played.faults.total() >= FAULTS_MIN, seed
        assert played.steps >= STEPS_MIN, seed


# Each of these has found a mistake once, in a machine, the audit or a checker; so have 0, 20, 93,
# 94, 118, 164, 183 and 194, which are above.
@pytest.mark.parametrize("seed", [207, 272, 337, 420, 896, 5963, 7024, 8593])
def test_seed_that_has_found_something_holds(seed: int) -> None:
    played = play(seed)
    assert played.holds, played.line


def test_run_that_cannot_go_on_says_who_waits_for_what() -> None:
    drawn = dataclasses.replace(draw(1), first=0, faults={"kill-trainer": 1.0})
    played = Swarm(drawn).play()
    assert played.check == "live"
    assert "orchestrator waits for a worker" in played.what


@pytest.mark.pure
@pytest.mark.slow
def test_three_hundred_more_seeds_hold_and_meet_everything() -> None:
    coverage = Coverage()
    for seed in range(1000, 1300):
        coverage.add(play(seed))
    assert [one.line for one in coverage.broken] == []
    assert coverage.unmet() == []
