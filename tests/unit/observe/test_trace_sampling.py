"""Which groups are traced: a share by their ids, and always what is remarkable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.catalogue.account import GroupEnded
from dora_pipe.observe.traces.trace_sampling import RECENT_MIN, SamplingPolicy, TailSampler
from dora_pipe.schemas.identity import group_id
from dora_pipe.schemas.rounds import Dispatch, End, Fate, Fence
from tests.support.account_stage import W0, W1, began, place, spec, whole

NONE = SamplingPolicy(ratio=0.0, slow=2.0)


def _ended(ordinal: int, *, lasted_ms: float = 100.0, fate: Fate = "filtered") -> GroupEnded:
    own = spec(group_id("train", ordinal))
    told = began().decide(100, Dispatch(reason="room", spec=own), place("w0", W0, 0, 1, of=own))
    (ended,) = told.decide(100 + lasted_ms, End(reason="", group=own.group, fate=fate)).ended
    assert isinstance(ended, GroupEnded)
    return ended


RUN = began().run


def test_everything_is_traced_without_a_share() -> None:
    assert TailSampler(SamplingPolicy()).why(RUN, _ended(0)) == "all"


@given(st.floats(0.05, 0.95))
def test_share_is_about_what_was_asked_for_and_the_same_every_time(ratio: float) -> None:
    share = SamplingPolicy(ratio=ratio, slow=1e9)
    ended = [_ended(ordinal) for ordinal in range(40)]
    kept = [TailSampler(share).why(RUN, one) for one in ended]
    assert kept == [TailSampler(share).why(RUN, one) for one in ended]
    assert set(kept) <= {"", "ratio"}
    assert abs(kept.count("ratio") / 40 - ratio) < 0.3


def test_larger_share_holds_the_smaller_one() -> None:
    ended = [_ended(ordinal) for ordinal in range(40)]
    few = {n for n, one in enumerate(ended) if TailSampler(SamplingPolicy(ratio=0.2)).why(RUN, one)}
    more = {
        n for n, one in enumerate(ended) if TailSampler(SamplingPolicy(ratio=0.6)).why(RUN, one)
    }
    assert few < more


def test_failed_group_is_always_traced() -> None:
    assert TailSampler(NONE).why(RUN, _ended(0)) == ""
    assert TailSampler(NONE).why(RUN, _ended(0, fate="failed")) == "failed"


def test_group_that_lost_a_worker_is_always_traced() -> None:
    told = began().decide(100, Dispatch(reason="room", spec=spec()), place("w0", W0, 0, 1))
    told.decide(150, Fence(reason="silent", worker="w0", epoch=W0))
    told.decide(160, place("w1", W1, 0, 1, attempt=2))
    (ended,) = told.decide(300, End(reason="", group=spec().group, fate="filtered")).ended
    assert isinstance(ended, GroupEnded)
    assert TailSampler(NONE).why(RUN, ended) == "failed"


def test_group_that_moved_is_always_traced() -> None:
    ended = whole().ended[0]
    assert isinstance(ended, GroupEnded)
    assert TailSampler(NONE).why(RUN, ended) == "moved"


@pytest.mark.parametrize(("lasted_ms", "why"), [(199.0, ""), (201.0, "slow")])
def test_group_that_took_twice_as_long_as_others_is_slow(lasted_ms: float, why: str) -> None:
    keeper = TailSampler(NONE)
    for ordinal in range(RECENT_MIN):
        assert keeper.why(RUN, _ended(ordinal)) == ""
    assert keeper.why(RUN, _ended(99, lasted_ms=lasted_ms)) == why


def test_nothing_is_slow_before_anybody_knows_what_slow_is() -> None:
    keeper = TailSampler(NONE)
    for ordinal in range(RECENT_MIN - 1):
        keeper.why(RUN, _ended(ordinal, lasted_ms=1.0))
    assert keeper.why(RUN, _ended(99, lasted_ms=1000.0)) == ""
