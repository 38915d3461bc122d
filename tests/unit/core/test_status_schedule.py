"""Tests of status timing and byte budget."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config.model import Timing
from dora_pipe.core.pure.status_schedule import HEARTBEAT_BYTES, StatusSchedule, quiet_ns
from dora_pipe.schemas.metrics import Cost, OrchestratorStatus

S = 1_000_000_000
HEARTBEAT, QUIET = S // 2, 2 * S
COST = Cost(total_s=1.0, bus_s=0.1, control_s=0.2, codec_s=0.3, rss_bytes=4)


def status(version: int = 0, at_s: float = 0.0) -> OrchestratorStatus:
    cost = msgspec.structs.replace(COST, total_s=at_s)
    at_ns = int(at_s * S)
    return OrchestratorStatus(
        at_ns=at_ns, cost=cost, incarnation=1, version=version, open_groups=0, queued_requests=0
    )


def played(
    news: dict[float, int], *, until_s: float, size_bytes: int = 100, quiet: int = QUIET
) -> list[float]:
    schedule, text, now_ns = StatusSchedule(heartbeat_ns=HEARTBEAT, quiet_ns=quiet), [], 0
    while now_ns <= until_s * S:
        now_s = now_ns / S
        version = max((new for at_s, new in news.items() if at_s <= now_s), default=0)
        if schedule.goes_out(status(version, now_s), now_ns):
            schedule.note_sent(size_bytes, now_ns)
            text.append(now_s)
        assert now_ns < schedule.due_ns <= now_ns + HEARTBEAT, "it looks at every heartbeat"
        now_ns = schedule.due_ns
    return text


def test_without_news_a_status_goes_out_once_a_quiet_period() -> None:
    assert played({}, until_s=6) == [0, 2, 4, 6]


def test_news_go_out_at_the_next_heartbeat_and_begin_a_quiet_period() -> None:
    assert played({0.7: 1}, until_s=5) == [0, 1, 3, 5]


def test_a_quiet_period_is_five_heartbeats_and_at_most_a_quarter_of_a_lease() -> None:
    assert quiet_ns(Timing()) == 5 * S // 2
    assert quiet_ns(Timing(lease_s=60.0)) == 5 * S // 2
    assert quiet_ns(Timing(heartbeat_s=0.5, lease_s=4.0)) == S
    assert quiet_ns(Timing(heartbeat_s=0.5, lease_s=1.5)) == S // 2, "no less than a heartbeat"


def test_news_after_a_large_status_wait_until_it_is_paid_for_but_no_longer_than_quiet() -> None:
    always = {index / 10: index for index in range(1, 300)}
    small = played(always, until_s=20, size_bytes=HEARTBEAT_BYTES)
    assert len(small) == 41, "what fits comes at every heartbeat"
    large = played(always, until_s=20, size_bytes=2 * HEARTBEAT_BYTES)
    assert 20 <= len(large) <= 25, "twice as large, half as often, and a little on credit"
    huge = played(always, until_s=20, size_bytes=100 * HEARTBEAT_BYTES)
    assert huge == [0, *range(2, 21, 2)]


@given(st.lists(st.tuples(st.integers(0, S), st.integers(1, 5000), st.booleans()), max_size=60))
def test_between_two_statuses_lies_at_most_a_quiet_period(
    turns: list[tuple[int, int, bool]],
) -> None:
    schedule, now_ns, last_ns, version = (
        StatusSchedule(heartbeat_ns=HEARTBEAT, quiet_ns=QUIET),
        0,
        0,
        0,
    )
    for forward_ns, size_bytes, news in turns:
        now_ns = max(now_ns, schedule.due_ns)
        version += news
        if schedule.goes_out(status(version), now_ns):
            assert now_ns - last_ns <= QUIET
            last_ns = now_ns
            schedule.note_sent(size_bytes, now_ns)
        schedule.bring_forward(forward_ns)
