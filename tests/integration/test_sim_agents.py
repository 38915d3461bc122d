"""Seeds of the swarm that run agents: no violation, and what befalls them is met."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable

import msgspec
import pytest

from dora_pipe.sim.faults import OF_AGENTS, OF_EPISODES
from dora_pipe.sim.scenario import AGENTS_SECONDS, Form, Scenario, draw
from dora_pipe.sim.seed_runner import SeedResult, run_seed

FIRST, MORE = range(9, 14), range(14, 400)
KINDS = (*OF_AGENTS, *OF_EPISODES)
WITH_AGENTS = 40


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)


def has_agents(drawn: Scenario) -> bool:
    return any(one.has_agent for one in drawn.config.tasks)


def played(seeds: Iterable[int]) -> list[SeedResult]:
    """Those of these seeds that run agents."""
    return [run_seed(seed) for seed in seeds if has_agents(draw(seed))]


def test_seeds_with_agents_hold() -> None:
    results = played(FIRST)
    assert len(results) == 3
    assert [one.line for one in results if not one.holds] == []
    assert all(one.states["call answered"] > 50 for one in results)
    assert any(one.states["call answered again"] for one in results)


def test_agents_come_to_one_of_four_seeds_and_change_nothing_else_of_it() -> None:
    forms: tuple[Form, ...] = ("plain", "long")
    drawn = [[draw(seed, form=one) for one in forms] for seed in range(200)]
    assert 30 <= sum(has_agents(one) for _, one in drawn) <= 70
    for before, one in drawn:
        assert not has_agents(before) and before.faults.keys().isdisjoint(KINDS)
        assert before.faults.items() <= one.faults.items()
        groups = before.config.groups
        if has_agents(one) and groups.seconds_max:
            longer_s = max(AGENTS_SECONDS, groups.seconds_max)
            groups = msgspec.structs.replace(groups, seconds_max=longer_s)
        assert (before.config.run, groups) == (one.config.run, one.config.groups)
        if not (has_agents(one) or one.episodes):
            assert one == before


@pytest.mark.pure
@pytest.mark.slow
def test_more_seeds_with_agents_hold_and_meet_what_befalls_them() -> None:
    count, struck = 0, Counter[str]()
    for seed in MORE:
        if count >= WITH_AGENTS and all(struck[kind] for kind in KINDS):
            break
        for one in played([seed]):
            assert one.holds, one.line
            struck.update(one.faults)
            count += 1
    assert [kind for kind in KINDS if not struck[kind]] == []
