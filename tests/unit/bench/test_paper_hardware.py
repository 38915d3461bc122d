"""Tests of the modeled engine against a loop over tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.studies.paper.hardware import EngineRates, Sharing

RATES = EngineRates(tau_s=0.02, rise=0.5, full=4)


def drain(batch: Sharing) -> dict[str, float]:
    results: dict[str, float] = {}
    while len(batch):
        at_s = batch.next_s()
        for name in batch.advance(at_s):
            results[name] = at_s
    return results


def token_by_token(lengths: dict[str, int], rates: EngineRates) -> dict[str, float]:
    remaining_lengths, now_s, result = dict(lengths), 0.0, {}
    while remaining_lengths:
        now_s += rates.tau(len(remaining_lengths))
        remaining_lengths = {name: tokens - 1 for name, tokens in remaining_lengths.items()}
        for name in [name for name, tokens in remaining_lengths.items() if not tokens]:
            result[name] = now_s
            del remaining_lengths[name]
    return result


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(1, 40), min_size=1, max_size=8))
def test_sharing_ends_requests_when_a_loop_over_tokens_does(lengths: dict[str, int]) -> None:
    batch = Sharing(RATES)
    for name, tokens in lengths.items():
        batch.add(name, tokens)
    result, token = drain(batch), token_by_token(lengths, RATES)
    assert result.keys() == token.keys()
    for name in token:
        assert result[name] == pytest.approx(token[name], abs=1e-6)
