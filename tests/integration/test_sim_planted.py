"""Planted bugs are found; what is planted is gone afterwards."""

from __future__ import annotations

import logging

import pytest

from dora_pipe.orchestrator import colocated, staleness
from tests.support.mutants.rules import BUGS, finding, mutated
from tests.support.mutants.seeds import seeds_of

SEEDS_MAX = 1_000


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("name", sorted(BUGS))
def test_planted_bug_is_found(name: str) -> None:
    assert finding(name, SEEDS_MAX) is not None


def test_every_bug_can_be_met_by_one_of_the_first_seeds() -> None:
    assert all(list(seeds_of(name, 60)) for name in BUGS)
    assert sorted(seeds_of("short-batch", 30)) == [*range(30)]


def test_nothing_stays_planted() -> None:
    take = staleness.next_batch
    assert vars(colocated)["next_batch"] is take
    with mutated("short-batch"):
        assert vars(colocated)["next_batch"] is not take
    assert vars(colocated)["next_batch"] is take is staleness.next_batch
