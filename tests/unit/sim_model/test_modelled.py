"""The running batch of a modelled engine, against a loop over tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.sim.modelled_worker import NEVER_S, EngineRates, Sharing, TrainerRates

RATES = EngineRates(tau_s=0.02, rise=0.5, full=4)


def drain(batch: Sharing) -> dict[str, float]:
    """When each request ends."""
    found: dict[str, float] = {}
    while len(batch):
        at_s = batch.next_s()
        for name in batch.advance(at_s):
            found[name] = at_s
    return found


def token_by_token(lengths: dict[str, int], rates: EngineRates) -> dict[str, float]:
    """The same by a loop: every turn gives each active request one token."""
    left, now_s, found = dict(lengths), 0.0, {}
    while left:
        now_s += rates.tau(len(left))
        left = {name: tokens - 1 for name, tokens in left.items()}
        for name in [name for name, tokens in left.items() if not tokens]:
            found[name] = now_s
            del left[name]
    return found


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 40), min_size=1, max_size=8))
def test_sharing_ends_requests_when_a_loop_over_tokens_does(lengths: dict[str, int]) -> None:
    batch = Sharing(RATES)
    for name, tokens in lengths.items():
        batch.add(name, tokens)
    found, wanted = drain(batch), token_by_token(lengths, RATES)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], abs=1e-6)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=6), st.lists(st.floats(0.01, 3), max_size=5)
)
def test_looking_more_often_changes_nothing(lengths: list[int], looks: list[float]) -> None:
    plain, watched = Sharing(RATES), Sharing(RATES)
    for number, tokens in enumerate(lengths):
        plain.add(str(number), tokens)
        watched.add(str(number), tokens)
    found: dict[str, float] = {}
    for look_s in sorted(looks):
        while watched.next_s() <= look_s:
            at_s = watched.next_s()
            found |= dict.fromkeys(watched.advance(at_s), at_s)
        watched.advance(look_s)
    found |= drain(watched)
    wanted = drain(plain)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name] == pytest.approx(wanted[name], abs=1e-6)


def test_what_was_removed_never_ends_and_says_how_far_it_came() -> None:
    batch = Sharing(EngineRates(tau_s=0.1))
    batch.add("stays", 100)
    batch.add("goes", 50)
    batch.advance(2.0)
    assert batch.sampled("goes") == pytest.approx(20)
    assert batch.remove("goes") == pytest.approx(20)
    assert drain(batch) == {"stays": pytest.approx(10.0)}


def test_a_request_goes_on_where_it_left_off() -> None:
    first, second = Sharing(EngineRates(tau_s=0.1)), Sharing(EngineRates(tau_s=0.1))
    first.add("r", 30)
    first.advance(1.0)
    here = first.remove("r")
    second.skip(1.0)
    second.add("r", 30 - here)
    assert drain(second) == {"r": pytest.approx(3.0)}


def test_prefill_and_new_weights_stall_everybody() -> None:
    batch = Sharing(EngineRates(tau_s=0.1, prefill_tokens_s=1000))
    batch.add("first", 10)
    batch.add("second", 20, prefill=500)
    batch.stall(1.0)
    assert drain(batch) == {"first": pytest.approx(2.5), "second": pytest.approx(3.5)}


def test_slot_time_counts_active_requests() -> None:
    batch = Sharing(EngineRates(tau_s=0.1))
    batch.add("short", 10)
    batch.add("long", 30)
    drain(batch)
    batch.advance(10.0)
    assert batch.slot_s == pytest.approx(4.0)
    assert batch.busy_s == pytest.approx(3.0)
    assert batch.next_s() == NEVER_S


def test_a_move_costs_its_kv_and_a_step_its_tokens() -> None:
    rates = EngineRates(tau_s=0.02, kv_bytes=1000, link_bytes_s=1e6)
    assert rates.move_s(2000) - rates.move_s(0) == pytest.approx(2.0)
    assert TrainerRates(fixed_s=3.0, token_s=0.1, sample_s=1.0).step_s(tokens=10, samples=2) == 6.0
