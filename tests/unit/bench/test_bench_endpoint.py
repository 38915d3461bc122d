"""`bench endpoint` measures what it says."""

from __future__ import annotations

from dora_pipe.bench.endpoint import bench_busy, bench_calls, bench_memory
from dora_pipe.bench.worker_memory import bench_worker_memory


def test_a_call_costs_something_and_more_with_more_tokens() -> None:
    small, large = bench_calls(((64, 16), (4096, 16)), calls=10)
    assert 64 <= small.prompt_tokens < large.prompt_tokens
    assert 0 < small.ms_per_call < large.ms_per_call
    assert small.worker_us_per_call > 0


def test_sessions_hold_memory() -> None:
    figure = bench_memory(500, called=10)
    assert figure.process_mb > 20
    assert 0 <= figure.kb_per_session < 100


def test_a_session_and_a_call_of_it_hold_some_kilobytes_of_their_worker() -> None:
    figure = bench_worker_memory(2000, called=200)
    assert (figure.process, figure.sessions) == ("worker", 2000)
    assert 0 < figure.kb_per_session < 10
    assert 0 < figure.kb_per_call < 20


def test_slots_are_taken_while_agents_think() -> None:
    figure = bench_busy(64, seconds=2.0, warm_s=1.0)
    assert 0.1 < figure.busy <= 1.0
    assert figure.calls_per_s > 10
