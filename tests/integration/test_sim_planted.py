"""Planted bugs are found; what is planted is gone afterwards."""

from __future__ import annotations

import logging

import pytest

from dora_pipe.orchestrator import colocated, staleness
from tests.support.mutants.rules import BUGS, finding, mutated
from tests.support.mutants.seeds import seeds_of
from tests.support.tiers import more

SEEDS_MAX = 1_000
FAST = ("short-batch", "commit-again", "progress-lost", "calls-stay", "pins-forgotten", "part-lost")


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("name", [*FAST, *more(sorted(BUGS.keys() - set(FAST)))])
def test_planted_bug_is_found(name: str) -> None:
    assert finding(name, SEEDS_MAX) is not None


def test_a_bug_of_every_run_can_be_met_by_every_seed() -> None:
    assert sorted(seeds_of("short-batch", 30)) == [*range(30)]


def test_nothing_stays_planted() -> None:
    take = staleness.next_batch
    assert vars(colocated)["next_batch"] is take
    with mutated("short-batch"):
        assert vars(colocated)["next_batch"] is not take
    assert vars(colocated)["next_batch"] is take is staleness.next_batch
