"""Tests of the time average of requests that need no slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.worker.off_engine import AVERAGED_NS, NEVER_NS, OffEngine

LONG_NS = 8 * AVERAGED_NS


def alternating(away_ns: int, here_ns: int, *, until_ns: int, requests: int) -> OffEngine:
    """Return requests that leave the engine and return simultaneously."""
    found, now_ns = OffEngine(), 0
    while now_ns < until_ns:
        for name in range(requests):
            found.add(str(name), now_ns)
        now_ns += away_ns
        for name in range(requests):
            found.discard(str(name), now_ns)
        now_ns += here_ns
    found.mean(now_ns, requests)
    return found


def test_short_waits_count_for_the_share_of_time_that_they_take() -> None:
    brief = AVERAGED_NS // 100
    found = alternating(brief, brief, until_ns=LONG_NS, requests=100)
    assert len(found) == 0
    assert 48 <= found.mean(LONG_NS, 100) <= 52


def test_who_has_been_away_for_long_is_counted_and_who_came_back_is_not() -> None:
    found = OffEngine()
    found.add("a", 0)
    found.add("b", 0)
    assert found.mean(LONG_NS, 9) == 2
    found.discard("a", LONG_NS)
    assert found.mean(2 * LONG_NS, 9) == 1


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 3 * LONG_NS))
def test_the_time_at_which_a_count_is_reached_is_known_beforehand(
    before: int, after: int, count: int, settled_ns: int
) -> None:
    found = OffEngine()
    for name in range(before):
        found.add(str(name), 0)
    now_ns = settled_ns
    found.mean(now_ns, before)
    for name in range(max(before, after)):
        (found.add if name < after else found.discard)(str(name), now_ns)
    first = found.mean(now_ns, 100)
    due_ns = found.reaches_ns(count)
    if due_ns == NEVER_NS:
        last = found.mean(now_ns + 40 * AVERAGED_NS, 100)
        assert not min(first, last) < count < max(first, last)
        return
    assert due_ns >= now_ns
    reached = found.mean(due_ns, 100)
    assert reached >= count if after > first else reached <= count
