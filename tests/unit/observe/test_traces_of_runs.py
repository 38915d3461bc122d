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
    attempts = [span for span in spans if span.stage == "generated"]
    fenced = [attempt for attempt in attempts if attempt.attributes[names.OUTCOME] == "fenced"]
    assert {span.attributes[names.WORKER] for span in fenced} >= {"w0", "w1"}
    assert all(span.error and span.attributes[names.ERROR] == "fenced" for span in fenced)
    resumed = [attempt for attempt in attempts if names.RESUMED in attempt.attributes]
    assert resumed
    invalid = [span for span in spans if span.stage == "reward" and span.error]
    bound = [result for group in ledger.accounts.groups.values() for result in group.bound]
    assert len(invalid) == sum(report.fact.reward is None for report in bound)
    assert invalid[0].error.startswith("ValueError")


def test_tokens_of_the_attempts_are_those_of_the_trajectory(
    spans: list[Span], ledger: Ledger
) -> None:
    check_whole(spans)
    stage: dict[str, int] = {}
    for span in spans:
        if span.stage == "generated":
            name, tokens = str(span.attributes[names.RESPONSE]), span.attributes[names.OUTPUT]
            assert isinstance(tokens, int)
            stage[name] = stage.get(name, 0) + tokens
    logged = {
        result.fact.trajectory: result.fact.tokens
        for group in ledger.accounts.groups.values()
        for result in group.bound
    }
    assert {name: stage[name] for name in logged} == logged


def test_evaluation_ends_without_a_step(spans: list[Span]) -> None:
    roots = [span for span in spans if span.stage == "group"]
    evaluated = [root for root in roots if root.attributes[names.PURPOSE] == "eval"]
    assert evaluated
    assert {span.attributes[names.OUTCOME] for span in evaluated} == {"evaluated"}
    traces = {span.trace_id for span in evaluated}
    assert {"selected", "trained"} & {
        span.stage for span in spans if span.trace_id in traces
    } == set()
