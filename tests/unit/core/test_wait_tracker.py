"""Tests of durations, ends and alarms of waits."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.pure.wait_tracker import (
    BLOCKERS_MAX,
    LEARNT_MIN,
    WORK_FACTOR,
    LimitKind,
    Limits,
    PendingWait,
    WaitTracker,
    alarm_line,
)
from dora_pipe.schemas.metrics import Blocker, Wait

S = 1_000_000_000
WALL = 10**18
LIMITS = Limits(short_s=10.0, work_s=100.0)


def book() -> WaitTracker:
    return WaitTracker("w1", LIMITS)


def take(
    kept: WaitTracker, at_s: float, *wait: PendingWait, wall_s: float | None = None
) -> tuple[Wait, ...]:
    mono_ns = int(at_s * S)
    return kept.update(wait, mono_ns=mono_ns, wall_ns=WALL + int((wall_s or at_s) * S))


def reward(key: str = "a", **changes: object) -> PendingWait:
    plain = {"name": "reward", "words": "rewards (1)", "key": key}
    return PendingWait(**(plain | changes))  # type: ignore[arg-type]


def test_wait_begins_when_it_is_found_first_and_keeps_its_beginning() -> None:
    kept = book()
    assert take(kept, 5, reward())[0].since_ns == WALL + 5 * S
    assert take(kept, 7, reward(words="rewards (3)"))[0] == Wait(
        name="reward", description="rewards (3)", since_ns=WALL + 5 * S, limit_ms=10_000
    )


def test_wait_beyond_its_limit_is_an_alarm_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = book()
    blocked = reward(blockers=(Blocker("trajectory", "g0000000017-003"),))
    with caplog.at_level(logging.WARNING):
        assert [take(kept, position, blocked)[0].overdue for position in (1, 10, 11)] == [False] * 3
        assert [take(kept, position, blocked)[0].overdue for position in (11.5, 12, 60)] == [
            True
        ] * 3
    assert [record.message for record in caplog.records] == [
        "ALARM w1: waiting 10.5 s for rewards (1) (limit 10 s): trajectory g0000000017-003"
    ]


def test_jump_of_the_wall_clock_raises_no_alarm_and_moves_no_beginning() -> None:
    kept = book()
    before = take(kept, 1, reward())[0]
    after = take(kept, 2, reward(), wall_s=1e6)[0]
    assert (after.since_ns, after.overdue) == (before.since_ns, False)


def test_work_has_the_configured_limit_until_the_run_has_shown_how_long_it_lasts() -> None:
    kept = book()
    now_s = 0.0
    for number in range(LEARNT_MIN):
        assert kept.limit_s("batch", "work") == LIMITS.work_s
        take(kept, now_s, PendingWait(name="batch", words="b", key=str(number), limit="work"))
        now_s += 5.0 + number
    take(kept, now_s)
    longest_s = 5.0 + LEARNT_MIN - 1
    assert kept.limit_s("batch", "work") == pytest.approx(WORK_FACTOR * longest_s)
    assert kept.limit_s("groups", "work") == LIMITS.work_s


def test_wait_that_stops_the_work_comes_first_and_blockers_are_counted() -> None:
    many = [Blocker("group", f"g{number}") for number in range(BLOCKERS_MAX + 3)]
    waits = take(
        book(), 1, reward(), PendingWait(name="groups", words="g", still=True, blockers=many)
    )
    assert [wait.name for wait in waits] == ["groups", "reward"]
    assert waits[0].blockers == tuple(many[:BLOCKERS_MAX])
    assert (waits[0].more, waits[1].more) == (3, 0)


def test_alarm_line_does_not_repeat_what_the_words_name() -> None:
    wait = Wait(
        name="groups",
        description="groups g1 (version 0, 1 of 4 open) and 3 more",
        since_ns=0,
        limit_ms=30_000,
        overdue=True,
        blockers=(Blocker("group", "g1"), Blocker("group", "g2")),
        more=2,
    )
    assert alarm_line("orchestrator", wait, 31.25) == (
        "ALARM orchestrator: waiting 31.25 s for groups g1 (version 0, 1 of 4 open) and 3 more"
        " (limit 30 s): group g2 and 2 more"
    )


KINDS: list[LimitKind] = ["short", "work", "free"]


@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from("abc"), st.sampled_from(KINDS)), min_size=1
    )
)
def test_alarm_is_exactly_a_wait_longer_than_its_limit(
    turns: list[tuple[int, str, LimitKind]],
) -> None:
    kept, now_s, began = book(), 0, dict[str, int]()
    for pause_s, name, kind in turns:
        now_s += pause_s
        (wait,) = take(kept, now_s, PendingWait(name=name, words=name, limit=kind))
        began = {name: began.get(name, now_s)}
        assert wait.since_ns == WALL + began[name] * S
        longer = wait.limit_ms is not None and (now_s - began[name]) * 1000 > wait.limit_ms
        assert wait.overdue == longer
