"""Tests of the time average of requests that need no slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.worker.status import AVERAGED_NS, NEVER_NS, OffEngine

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
    assert len(result) == 0
    assert 48 <= result.mean(LONG_NS, 100) <= 52


def test_who_has_been_away_for_long_is_counted_and_who_came_back_is_not() -> None:
    engine = OffEngine()
    engine.add("a", 0)
    engine.add("b", 0)
    assert engine.mean(LONG_NS, 9) == 2
    engine.discard("a", LONG_NS)
    assert engine.mean(2 * LONG_NS, 9) == 1


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 3 * LONG_NS))
def test_the_time_at_which_a_count_is_reached_is_known_beforehand(
    before: int, after: int, count: int, settled_ns: int
) -> None:
    engine = OffEngine()
    for name in range(before):
        engine.add(str(name), 0)
    now_ns = settled_ns
    engine.mean(now_ns, before)
    for name in range(max(before, after)):
        (engine.add if name < after else engine.discard)(str(name), now_ns)
    first = engine.mean(now_ns, 100)
    due_ns = engine.reaches_ns(count)
    if due_ns == NEVER_NS:
        last = engine.mean(now_ns + 40 * AVERAGED_NS, 100)
        assert not min(first, last) < count < max(first, last)
        return
    assert due_ns >= now_ns
    reached = engine.mean(due_ns, 100)
    assert reached >= count if after > first else reached <= count
