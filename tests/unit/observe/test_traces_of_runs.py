"""Tests of complete traces in runs with faults."""

from __future__ import annotations

import logging

import pytest

from dora_pipe.audit.ledger import Ledger
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.span import Span
from dora_pipe.sim.scenario import draw
from dora_pipe.sim.seed_runner import SeedRun
from dora_pipe.sim.world import World
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.tiers import more
from tests.support.traces import check_traces, check_whole


class _Traced(SeedRun):
    """Run that checks a seed's traces instead of auditing it."""

    trained = 0

    def _audit(self, world: World) -> None:
        self.trained = check_traces(world.bus, world.topics)


@pytest.mark.parametrize("seed", [2, *more([0, 1, 3, 4, 5])])
def test_paths_are_unbroken_in_a_simulated_run_with_faults(seed: int) -> None:
    logging.getLogger("dora_pipe").setLevel(logging.CRITICAL)
    seed_run = _Traced(draw(seed, steps=14))
    assert seed_run.run().holds
    assert seed_run.trained >= 10


def test_paths_are_unbroken_in_a_run_of_the_real_machines(
    bus: SqliteBus, recorded: RecordedRun
) -> None:
    assert check_traces(bus, recorded.topics) == STEPS * 4 * 4


def test_what_went_wrong_is_told_where_it_went_wrong(spans: list[Span], ledger: Ledger) -> None:
    attempts = [one for one in spans if one.stage == "generated"]
    fenced = [one for one in attempts if one.attributes[names.OUTCOME] == "fenced"]
    assert {one.attributes[names.WORKER] for one in fenced} >= {"w0", "w1"}
    assert all(one.error and one.attributes[names.ERROR] == "fenced" for one in fenced)
    resumed = [one for one in attempts if names.RESUMED in one.attributes]
    assert resumed
    invalid = [one for one in spans if one.stage == "reward" and one.error]
    bound = [one for group in ledger.accounts.groups.values() for one in group.results]
    assert len(invalid) == sum(one.fact.reward is None for one in bound)
    assert invalid[0].error.startswith("ValueError")


def test_tokens_of_the_attempts_are_those_of_the_trajectory(
    spans: list[Span], ledger: Ledger
) -> None:
    check_whole(spans)
    told: dict[str, int] = {}
    for one in spans:
        if one.stage == "generated":
            name, tokens = str(one.attributes[names.RESPONSE]), one.attributes[names.OUTPUT]
            assert isinstance(tokens, int)
            told[name] = told.get(name, 0) + tokens
    logged = {
        one.fact.trajectory: one.fact.tokens
        for group in ledger.accounts.groups.values()
        for one in group.results
    }
    assert {name: told[name] for name in logged} == logged


def test_evaluation_ends_without_a_step(spans: list[Span]) -> None:
    roots = [one for one in spans if one.stage == "group"]
    evaluated = [one for one in roots if one.attributes[names.PURPOSE] == "eval"]
    assert evaluated
    assert {one.attributes[names.OUTCOME] for one in evaluated} == {"evaluated"}
    traces = {one.trace_id for one in evaluated}
    assert {"selected", "trained"} & {one.stage for one in spans if one.trace_id in traces} == set()
