"""Sample tokens from logits by counter.

A token is a function of (logits, settings, seed, position). The generator is splitmix64 (Steele,
Lea and Flood 2014): its n-th number is a hash of n, so it has no state. Tokens are drawn by the
inverse cumulative distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.engines.slots import Drawn, Integers

Words = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]
Doubles = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
UNIFORM_BITS = 48
"""Fewer than float64's 53, so that uniform * total < total."""

_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_DROPPED_BITS = np.uint64(64 - UNIFORM_BITS)
_ULP = 2.0**-UNIFORM_BITS
_WORD = 2**64 - 1


def mix(words: Words) -> Words:
    words = (words ^ (words >> _S30)) * FIRST_FACTOR
    words = (words ^ (words >> _S27)) * SECOND_FACTOR
    return words ^ (words >> _S31)


def stream(seed: int) -> np.uint64:
    """Return the start for a seed of up to 128 bits."""
    low, high = np.array([seed & _WORD, (seed >> 64) & _WORD], np.uint64)[:, None]
    return np.uint64((mix(mix(low) + GAMMA) ^ mix(high))[0])


def uniforms(streams: Words, positions: Integers) -> torch.Tensor:
    """Return float64 in [0, 1) for each (stream, position)."""
    words = mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * GAMMA)
    return torch.from_numpy((words >> _DROPPED_BITS) * _ULP)


class Sampler:
    def __init__(self, *, slots: int, unassigned: Sequence[int] = ()) -> None:
        self._unassigned = torch.tensor(unassigned, dtype=torch.int64)
        self._streams = np.zeros(slots, np.uint64)
        self._temperature = np.ones(slots, np.float32)
        self._logprob_temperature = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float64)
        self._min_p = np.zeros(slots, np.float64)
        self._plain = np.ones(slots, np.bool_)

    def set(self, slot: int, params: SamplingParams, seed: int) -> None:
        self._streams[slot] = stream(seed)
        self._temperature[slot] = params.temperature
        self._logprob_temperature[slot] = params.logprob_temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._plain[slot] = (
            params.temperature == 1 and not params.top_k and params.top_p >= 1 and not params.min_p
        )

    def draw(self, logits: torch.Tensor, slots: Integers, positions: Integers) -> Drawn:
        """Draw one token per row of `logits` [rows, vocabulary]; overwrites unassigned ids."""
        if len(self._unassigned):
            logits.index_fill_(-1, self._unassigned, -torch.inf)
        recorded = torch.log_softmax(self._at_their_temperature(logits, slots), -1)
        shaped, special = logits, not self._plain[slots].all()
        greedy: Integers = np.zeros(0, np.int64)
        if special:
            shaped, greedy = self._shape(logits, slots)
        uniform = uniforms(self._streams[slots], positions)
        tokens = _inverse(torch.softmax(shaped, -1), uniform)
        if len(greedy):
            tokens[torch.from_numpy(greedy)] = logits[torch.from_numpy(greedy)].argmax(-1)
        logprobs = recorded.gather(1, tokens[:, None])[:, 0].numpy()
        sampler = logprobs
        if special:
            sampler = torch.log_softmax(shaped, -1).gather(1, tokens[:, None])[:, 0].numpy()
            sampler[greedy] = 0.0
        return Drawn(tokens=tokens.numpy(), logprobs=logprobs, sampler_logprobs=sampler)

    def _at_their_temperature(self, logits: torch.Tensor, slots: Integers) -> torch.Tensor:
        hot = self._logprob_temperature[slots]
        return logits if (hot == 1).all() else logits / torch.from_numpy(hot)[:, None]

    def _shape(self, logits: torch.Tensor, slots: Integers) -> tuple[torch.Tensor, Integers]:
        greedy = np.flatnonzero(self._temperature[slots] == 0)
        rows = np.flatnonzero(~self._plain[slots] & (self._temperature[slots] != 0))
        shaped = logits.clone()
        if len(rows):
            hot_slots = slots[rows]
            index = torch.from_numpy(rows)
            hot = logits[index] / torch.from_numpy(self._temperature[hot_slots])[:, None]
            shaped[index] = truncate(
                hot, self._top_k[hot_slots], self._top_p[hot_slots], self._min_p[hot_slots]
            )
        return shaped, greedy


def truncate(hot: torch.Tensor, top_k: Integers, top_p: Doubles, min_p: Doubles) -> torch.Tensor:
    """Return `hot` [rows, vocabulary] with -inf for tokens cut by top-k, top-p and min-p, in this
    order.

    Equal logits are cut together: neither sort order nor other rows matter.
    """
    exact = hot.double()
    best = exact.amax(-1)
    threshold = best + torch.from_numpy(np.log(np.maximum(min_p, np.finfo(np.float64).tiny)))
    threshold[torch.from_numpy(min_p == 0)] = -torch.inf
    if (top_k > 0).any() or (top_p < 1).any():
        ranked = exact.topk(_width(exact, top_k, top_p), -1).values
        at_k = _value_at_k(ranked, top_k)
        at_p = _value_at_p(exact, ranked, at_k, torch.from_numpy(top_p))
        threshold = threshold.maximum(at_k).maximum(at_p)
    return hot.masked_fill(exact < threshold[:, None], -torch.inf)


def _width(exact: torch.Tensor, top_k: Integers, top_p: Doubles) -> int:
    """Return how many of the largest values determine all thresholds.

    Tokens below (1 - top_p) / vocabulary sum to less than 1 - top_p; half of it allows for
    rounding.
    """
    vocabulary = exact.shape[-1]
    least = torch.from_numpy(np.maximum(1 - top_p, 0) / (2 * vocabulary))
    widths = (torch.softmax(exact, -1) >= least[:, None]).sum(-1).numpy()
    widths = np.where(top_p < 1, widths, 1)
    widths = np.where(top_k > 0, np.minimum(top_k, vocabulary), widths)
    return int(widths.max())


def _value_at_k(ranked: torch.Tensor, top_k: Integers) -> torch.Tensor:
    column = np.clip(top_k, 1, ranked.shape[-1]) - 1
    value = ranked.gather(1, torch.from_numpy(column)[:, None])[:, 0]
    return value.masked_fill(torch.from_numpy(top_k == 0), -torch.inf)


def _value_at_p(
    exact: torch.Tensor, ranked: torch.Tensor, at_k: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    best = ranked[:, :1]
    candidates = exact.masked_fill(exact < at_k[:, None], -torch.inf)
    total = (candidates - best).exp().sum(-1, keepdim=True)
    shares = (ranked - best).exp() / total
    before = shares.cumsum(-1) - shares
    kept = ((before < top_p[:, None]) & (ranked >= at_k[:, None])).sum(-1, keepdim=True)
    value = ranked.gather(1, kept.clamp(min=1) - 1)[:, 0]
    return value.masked_fill(top_p >= 1, -torch.inf)


def _inverse(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    target = (uniform * cumulative[:, -1])[:, None]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Only rows that are not finite exceed it; the engine ends them.
    return tokens.clamp_(max=probabilities.shape[-1] - 1)
