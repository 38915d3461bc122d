"""Planted bugs are found; what is planted is gone afterwards."""

from __future__ import annotations

import logging

import pytest

from dora_pipe.orchestrator import apply_decision, staleness
from dora_pipe.sim.mutants import BUGS, mutated
from dora_pipe.sim.mutants_of_sessions import OF_SESSIONS
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import run_seed

SEEDS_MAX = 500
RARE = frozenset(
    {
        "attempts-for-ever",
        "counted-at-once",
        "fenced-counts",
        "first-finished",
        "gate-from-0",
        "lease-in-outage",
        "leaving-counts",
        "newest-first",
        "old-scores-count",
        "open-call-lost",
        "orphan-forgotten",
        "part-outlives",
        "progress-lost",
        "restart-forgets",
        "short-batch",
        "told-otherwise",
        "too-many",
        "unknown-is-done",
        "weights-stay",
    }
)
"""Found after many seeds, some after hundreds: below, at length."""


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def found_by(name: str) -> str:
    """The check that finds it first; a bug of sessions is where agents are."""
    of_sessions = name in {bug for bug, _, _ in OF_SESSIONS}
    seeds = [
        seed
        for seed in range(SEEDS_MAX)
        if not of_sessions or any(one.has_agent for one in draw(seed).config.tasks)
    ]
    with mutated(name):
        played = (run_seed(seed) for seed in seeds)
        return next((one.check for one in played if not one.holds), "")


@pytest.mark.parametrize("name", sorted(BUGS.keys() - RARE))
def test_planted_bug_is_found(name: str) -> None:
    assert found_by(name)


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RARE))
def test_rare_planted_bug_is_found(name: str) -> None:
    assert found_by(name)


def test_nothing_stays_planted() -> None:
    take = staleness.next_batch
    assert vars(apply_decision)["next_batch"] is take
    with mutated("short-batch"):
        assert vars(apply_decision)["next_batch"] is not take
    assert vars(apply_decision)["next_batch"] is take is staleness.next_batch
