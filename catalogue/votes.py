"""Majority votes: decides what the most frequent of j answers of a prompt is worth.

An answer is worth the share of successes among the prompt's samples that gave it. `maj@j` of a
prompt is the mean, over all choices of j of its n samples, of what the most frequent answer among
the j is worth; where several are equally frequent, the mean of theirs; a sample without an answer
has no vote, and where nobody has one the choice is worth 0. The mean is exact for j = n and for n
up to `EXACT_MAX`; beyond, it is that of `DRAWN` choices by a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

VOTES_MIN: Final = 3
"""With fewer votes there is no majority against another: maj@1 and maj@2 are the mean."""

EXACT_MAX: Final = 32
DRAWN: Final = 1000
SEED: Final = 20_220_321

Shape = tuple[tuple[int, int], ...]
"""Of every answer of a prompt: how many samples gave it, and how many of these are successes."""


def maj_at(samples: Sequence[tuple[str, bool]], votes: int) -> float:
    """Of a prompt's samples, answer and success each, with at least so many of them.

    ``maj_at([("42", True), ("42", True), ("7", False), ("", False)], 4) == 1.0``
    """
    found: dict[str, tuple[int, int]] = {}
    for answer, won in samples:
        if answer:
            count, wins = found.get(answer, (0, 0))
            found[answer] = count + 1, wins + won
    shape = tuple(sorted(found.values()))
    silent = len(samples) - sum(count for count, _ in shape)
    if votes < len(samples) > EXACT_MAX:
        return _drawn(shape, silent, votes)
    return _exact(shape, silent, votes)


@lru_cache(maxsize=1 << 14)
def _exact(shape: Shape, silent: int, votes: int) -> float:
    """The sum over how often the most frequent answer is there, of choices times worth."""
    if votes == silent + sum(count for count, _ in shape):
        return _plurality([(count, wins / count) for count, wins in shape])
    total = 0.0
    for most in range(1, max((count for count, _ in shape), default=0) + 1):
        for (taken, tied), (_, worth) in _choices(shape, most, votes).items():
            if tied and votes - taken <= silent:
                total += worth / tied * math.comb(silent, votes - taken)
    return total / math.comb(silent + sum(count for count, _ in shape), votes)


def _choices(shape: Shape, most: int, votes: int) -> dict[tuple[int, int], tuple[int, float]]:
    """By samples that are chosen and answers that are there `most` times, none more often: the
    number of such choices, and the sum over them of what those answers are worth together."""
    found = {(0, 0): (1, 0.0)}
    for count, wins in shape:
        after: dict[tuple[int, int], tuple[int, float]] = {}
        for (taken, tied), (ways, worth) in found.items():
            for chosen in range(min(count, most, votes - taken) + 1):
                here, full = math.comb(count, chosen), chosen == most
                at = taken + chosen, tied + full
                before_ways, before_worth = after.get(at, (0, 0.0))
                more = worth + ways * wins / count if full else worth
                after[at] = before_ways + ways * here, before_worth + more * here
        found = after
    return found


@lru_cache(maxsize=1 << 12)
def _drawn(shape: Shape, silent: int, votes: int) -> float:
    import numpy as np

    labels = np.repeat(np.arange(len(shape) + 1), [*(count for count, _ in shape), silent])
    drawn = np.random.default_rng(SEED)
    values = []
    for _ in range(DRAWN):
        counts = np.bincount(drawn.permutation(labels)[:votes], minlength=len(shape))
        pairs = zip(counts.tolist(), shape, strict=False)  # Behind them are those without a vote.
        values.append(_plurality([(many, wins / count) for many, (count, wins) in pairs]))
    return math.fsum(values) / DRAWN


def _plurality(found: Sequence[tuple[int, float]]) -> float:
    """What the most frequent ones of (count, worth) are worth; 0 where none is there."""
    most = max((many for many, _ in found), default=0)
    worth = [one for many, one in found if many == most]
    return math.fsum(worth) / len(worth) if most else 0.0
