"""Seeds of the swarm that run agents: no violation, and what befalls them is met."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

import pytest

from dora_pipe.sim.faults import OF_AGENTS, OF_EPISODES
from dora_pipe.sim.scenario import Scenario, draw
from dora_pipe.sim.seed_runner import SeedResult, run_seed

FIRST, MORE = range(9, 14), range(14, 400)
KINDS = (*OF_AGENTS, *OF_EPISODES)
WITH_AGENTS = 40


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def has_agents(drawn: Scenario) -> bool:
    return any(task.has_agent for task in drawn.config.tasks)


def played(seeds: Iterable[int]) -> list[SeedResult]:
    return [run_seed(seed) for seed in seeds if has_agents(draw(seed))]


def test_seeds_with_agents_hold() -> None:
    results = played(FIRST)
    assert len(results) == 3
    assert [result.line for result in results if not result.holds] == []
    assert all(result.states["call answered"] > 50 for result in results)
    assert any(result.states["call answered again"] for result in results)


@pytest.mark.pure
@pytest.mark.slow
def test_more_seeds_with_agents_hold_and_meet_what_befalls_them() -> None:
    count, struck = 0, Counter[str]()
    for seed in MORE:
        if count >= WITH_AGENTS and all(struck[kind] for kind in KINDS):
            break
        for result in played([seed]):
            assert result.holds, result.line
            struck.update(result.faults)
            count += 1
    assert [kind for kind in KINDS if not struck[kind]] == []
