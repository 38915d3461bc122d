"""Tests of `bench endpoint`."""

from __future__ import annotations

from dora_pipe.bench.endpoint import bench_calls, bench_memory


def test_a_call_costs_something_and_more_with_more_tokens() -> None:
    small, large = bench_calls(((64, 16), (4096, 16)), calls=10)
    assert 64 <= small.prompt_tokens < large.prompt_tokens
    assert 0 < small.ms_per_call < large.ms_per_call
    assert small.worker_us_per_call > 0


def test_sessions_hold_memory() -> None:
    figure = bench_memory(500, called=10)
    assert figure.process_mb > 20
    assert 0 <= figure.kb_per_session < 100
