"""The bench of traces: what counts of a run, and how rounds are compared."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import closing

import pytest

from dora_pipe.bench.traces import WARM_STEPS, Endpoint, TracedRun, Traces, costs, measure, order
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import UsageError
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.stats_stage import stats_of


@pytest.fixture
def bus(recorded: RecordedRun) -> Iterator[SqliteBus]:
    with closing(recorded.open()) as opened:
        yield opened


def test_time_counts_from_the_last_warm_commit_to_the_last_one(
    bus: SqliteBus, recorded: RecordedRun
) -> None:
    found = measure(bus, recorded.topics, round_=3, traces="on", requests=2, sent_bytes=1500)
    steps = list(stats_of(bus, recorded.topics).steps)
    seconds = (steps[-1].committed_ns - steps[WARM_STEPS - 1].committed_ns) / 1e9
    assert (found.round, found.traces, found.steps) == (3, "on", STEPS - WARM_STEPS)
    assert found.seconds == pytest.approx(seconds, abs=0.01)
    trajectories = 4 * 4 * found.steps
    assert found.trained_trajectories_per_s == pytest.approx(trajectories / seconds, rel=0.01)
    trained = sum(one.tokens for one in steps[WARM_STEPS:])
    assert found.sampled_tokens_per_s * seconds > 0.8 * trained
    assert (found.requests, found.megabytes) == (2, 0.002)


def test_a_run_without_steps_that_count_is_refused(
    bus: SqliteBus, recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.bench.traces.WARM_STEPS", STEPS)
    with pytest.raises(UsageError, match=f"{STEPS} steps say nothing"):
        measure(bus, recorded.topics, round_=0, traces="off", requests=0, sent_bytes=0)


def _run(round_: int, traces: Traces, tokens: float) -> TracedRun:
    return TracedRun(
        round=round_,
        traces=traces,
        steps=10,
        seconds=1.0,
        sampled_tokens_per_s=tokens,
        trained_trajectories_per_s=tokens / 10,
        requests=0,
        megabytes=0.0,
    )


def test_every_round_is_a_ratio_and_equal_runs_say_what_noise_is() -> None:
    tokens = [(100.0, 98.0), (90.0, 90.0), (120.0, 108.0)]
    runs = [_run(at, "off", off) for at, (off, _) in enumerate(tokens)]
    runs += [_run(at, "on", on) for at, (_, on) in enumerate(tokens)]
    for found in costs(runs):
        assert (found.rounds, found.ratio, found.low, found.high) == (3, 0.98, 0.9, 1.0)
        assert (found.lost_percent, found.off_spread_percent) == (2.0, 33.33)


def test_who_is_first_changes_from_round_to_round() -> None:
    assert [order(round_) for round_ in range(3)] == [("off", "on"), ("on", "off"), ("off", "on")]


def test_the_endpoint_is_a_process_that_counts_what_it_takes() -> None:
    with Endpoint() as endpoint:
        for body in (b"x" * 100, b"y" * 11):
            with urllib.request.urlopen(f"{endpoint.address}/v1/traces", body) as answer:
                assert answer.status == 200
    assert (endpoint.requests, endpoint.bytes) == (2, 111)
