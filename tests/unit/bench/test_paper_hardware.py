"""Tests of the modeled engine against a loop over tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.studies.paper.hardware import EngineRates, Sharing

RATES = EngineRates(tau_s=0.02, rise=0.5, full=4)


def drain(batch: Sharing) -> dict[str, float]:
    found: dict[str, float] = {}
    while len(batch):
        at_s = batch.next_s()
        for name in batch.advance(at_s):
            found[name] = at_s
    return found


def token_by_token(lengths: dict[str, int], rates: EngineRates) -> dict[str, float]:
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
