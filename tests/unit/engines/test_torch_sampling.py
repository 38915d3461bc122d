"""Tests of the sampler: random numbers, distribution, truncation."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.engines.slots import Drawn
from dora_pipe.producers.engines.torch.sampling import GAMMA, Sampler, mix, stream, uniforms

PLAIN = SamplingParams()
SETTINGS = (
    PLAIN,
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5),
    SamplingParams(top_k=3),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.7, top_k=9, top_p=0.8, min_p=0.05),
)
SAMPLES = 20_000


def draw(
    logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]
) -> Drawn:
    sampler = Sampler(slots=len(params))
    for slot, (entry, seed) in enumerate(zip(params, seeds, strict=True)):
        sampler.set(slot, entry, seed)
    return sampler.draw(logits, np.arange(len(params)), np.array(positions))


def reference(logits: list[float], params: SamplingParams) -> dict[int, float]:
    if params.temperature == 0:
        return {max(range(len(logits)), key=lambda token: logits[token]): 1.0}
    hot = {token: value / params.temperature for token, value in enumerate(logits)}
    best = max(hot.values())
    remaining = _normalised({token: math.exp(value - best) for token, value in hot.items()})
    if params.top_k:
        least = sorted(remaining.values(), reverse=True)[: params.top_k][-1]
        remaining = _normalised({token: p for token, p in remaining.items() if p >= least})
    if params.top_p < 1:
        mass, least = 0.0, 0.0
        for p in sorted(remaining.values(), reverse=True):
            least = p
            mass += p
            if mass >= params.top_p:
                break
        remaining = _normalised({token: p for token, p in remaining.items() if p >= least})
    least = params.min_p * max(remaining.values())
    return _normalised({token: p for token, p in remaining.items() if p >= least})


def _normalised(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def test_random_numbers_are_those_of_splitmix64() -> None:
    outputs = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    state = np.zeros(3, np.uint64)
    assert mix(state + np.arange(1, 4).astype(np.uint64) * GAMMA).tolist() == outputs
    drawn = uniforms(state, np.arange(3))
    assert drawn.tolist() == [(output >> 16) / 2**48 for output in outputs]


def test_seeds_and_positions_give_other_numbers() -> None:
    streams = np.array([stream(seed) for seed in (0, 1, -1, 2**63 - 1, 2**64, 2**64 + 1)])
    table = np.stack([uniforms(streams, np.full(6, position)) for position in range(2000)])
    assert len(np.unique(table)) == table.size
    assert abs(np.corrcoef(table.T) - np.eye(6)).max() < 0.08
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.03


def test_tokens_have_the_distribution_of_the_logits() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 0.3, 1.8, -0.5, 0.0, 0.7])
    for params in SETTINGS:
        expected_reference = reference(logits.tolist(), params)
        for seeds, positions in (
            ([9] * SAMPLES, list(range(SAMPLES))),
            (list(range(SAMPLES)), [9] * SAMPLES),
        ):
            tokens = draw(logits.expand(SAMPLES, -1), [params] * SAMPLES, seeds, positions).tokens
            counts = np.bincount(tokens, minlength=len(logits))
            assert set(np.flatnonzero(counts)) == expected_reference.keys()
            expected = (
                np.array([expected_reference[token] for token in expected_reference]) * SAMPLES
            )
            chi2 = (((counts[list(expected_reference)] - expected) ** 2) / expected).sum()
            # At most seven degrees of freedom: 1 case in 2000 exceeds 26.
            assert chi2 < 26, params


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=30),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 32),
    st.sampled_from([0.05, 0.31, 0.77, 0.999, 1.0]),
    st.sampled_from([0.0, 0.013, 0.31, 1.0]),
)
def test_truncations_leave_what_the_reference_leaves(
    tenths: list[int], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = [value / 10 for value in tenths]
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected_reference = reference(logits, params)
    rows = 64
    drawn = draw(torch.tensor([logits] * rows), [params] * rows, list(range(rows)), [0] * rows)
    raw = torch.log_softmax(torch.tensor(logits), -1)
    for token, logprob, sampler in zip(
        drawn.tokens, drawn.logprobs, drawn.sampler_logprobs, strict=True
    ):
        assert token in expected_reference
        assert abs(sampler - math.log(expected_reference[token])) < 1e-5
        assert abs(logprob - raw[token]) < 1e-6


@given(st.integers(0, 2**32), st.integers(2, 40), st.integers(2, 200))
def test_a_row_is_drawn_the_same_alone_and_in_any_batch(
    seed: int, rows: int, vocabulary: int
) -> None:
    chance = np.random.default_rng(seed)
    logits = torch.from_numpy(chance.normal(0, 3, (rows, vocabulary)).astype(np.float32))
    params = [SETTINGS[int(n)] for n in chance.integers(0, len(SETTINGS), rows)]
    seeds = chance.integers(0, 2**63, rows).tolist()
    positions = chance.integers(0, 5000, rows).tolist()
    full_draw = draw(logits, params, seeds, positions)
    subset = chance.permutation(rows)[: int(chance.integers(1, rows))].tolist()
    part = draw(
        logits[subset],
        [params[row] for row in subset],
        [seeds[row] for row in subset],
        [positions[row] for row in subset],
    )
    for name in ("tokens", "logprobs", "sampler_logprobs"):
        assert getattr(part, name).tolist() == getattr(full_draw, name)[subset].tolist()


def test_plain_rows_have_one_logprob_and_greedy_rows_none_of_their_own() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = [PLAIN, SamplingParams(temperature=0.0), SamplingParams(temperature=2.0)] * 2
    drawn = draw(logits, params, list(range(6)), [3] * 6)
    plain, greedy, hot = ([row, row + 3] for row in range(3))
    assert drawn.sampler_logprobs[plain].tolist() == drawn.logprobs[plain].tolist()
    assert drawn.tokens[greedy].tolist() == logits[greedy].argmax(-1).tolist()
    assert drawn.sampler_logprobs[greedy].tolist() == [0.0, 0.0]
    assert (drawn.logprobs[greedy] < 0).all()
    assert (drawn.sampler_logprobs[hot] != drawn.logprobs[hot]).all()


def test_tokens_of_equal_logits_stay_or_go_together() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]] * 300)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.3)):
        drawn = draw(logits, [params] * 300, list(range(300)), [0] * 300)
        assert set(drawn.tokens.tolist()) == {1, 2, 3}
        assert np.allclose(drawn.sampler_logprobs, math.log(1 / 3))


def test_rows_that_are_not_finite_are_drawn_without_harm() -> None:
    logits = torch.zeros(4, 10)
    logits[1], logits[2, 3] = torch.nan, torch.inf
    drawn = draw(logits, [PLAIN] * 4, [1] * 4, [2] * 4)
    assert np.isfinite(drawn.logprobs).tolist() == [True, False, False, True]
    assert (drawn.tokens < 10).all()
    assert drawn.tokens[0] == drawn.tokens[3]


def test_a_wide_vocabulary_is_cut_like_a_narrow_one() -> None:
    chance = np.random.default_rng(4)
    logits = chance.normal(0, 4, 20_000).astype(np.float32)
    params = SamplingParams(top_p=0.95)
    expected_reference = reference(logits.tolist(), params)
    drawn = draw(
        torch.from_numpy(logits).expand(200, -1), [params] * 200, list(range(200)), [0] * 200
    )
    for token, sampler in zip(drawn.tokens, drawn.sampler_logprobs, strict=True):
        assert abs(sampler - math.log(expected_reference[int(token)])) < 1e-4
