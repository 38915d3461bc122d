"""Tests of the time average of requests that need no slot."""

from __future__ import annotations

from dora_pipe.producers.worker.status import AVERAGED_NS, OffEngine

LONG_NS = 8 * AVERAGED_NS


def alternating(away_ns: int, here_ns: int, *, until_ns: int, requests: int) -> OffEngine:
    engine, now_ns = OffEngine(), 0
    while now_ns < until_ns:
        for name in range(requests):
            engine.add(str(name), now_ns)
        now_ns += away_ns
        for name in range(requests):
            engine.discard(str(name), now_ns)
        now_ns += here_ns
    engine.mean(now_ns, requests)
    return engine


def test_short_waits_count_for_the_share_of_time_that_they_take() -> None:
    brief = AVERAGED_NS // 100
    result = alternating(brief, brief, until_ns=LONG_NS, requests=100)
    assert 48 <= result.mean(LONG_NS, 100) <= 52


def test_who_has_been_away_for_long_is_counted_and_who_came_back_is_not() -> None:
    engine = OffEngine()
    engine.add("a", 0)
    engine.add("b", 0)
    assert engine.mean(LONG_NS, 9) == 2
    engine.discard("a", LONG_NS)
    assert engine.mean(2 * LONG_NS, 9) == 1
