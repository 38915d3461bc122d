"""Identity without chance: ids, partitions, seeds and prompt order are functions of ordinals.

A group's id is its zero-padded dispatch ordinal behind the letter of its purpose (`g` train, `e`
evaluation: two counters, so that evaluations never change the prompts that training sees). A
trajectory's id adds the sibling. Neither the attempt nor the worker enters a seed, so a trajectory
that is generated again is the same trajectory.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from dora_pipe.core.errors import SchemaError

Purpose = Literal["train", "eval"]
"""What a group is for; evaluation groups never enter a batch."""

ORDINAL_DIGITS = 10
SIBLING_DIGITS = 3
SIBLINGS_MAX = 10**SIBLING_DIGITS
"""Of one group."""

_LETTERS: dict[Purpose, str] = {"train": "g", "eval": "e"}
_PURPOSES: dict[str, Purpose] = {"g": "train", "e": "eval"}
_TRAJECTORY = re.compile(r"(?P<letter>[ge])(?P<ordinal>[0-9]{10})-(?P<sibling>[0-9]{3})")
_SIBLINGS = [f"-{sibling:0{SIBLING_DIGITS}d}" for sibling in range(SIBLINGS_MAX)]
_FEISTEL_ROUNDS = 6
_PROMPTS_KEPT = 4096
"""Who asks for the prompt of an ordinal asks more than once."""
_SCRAMBLES_KEPT = 8192
"""Enough for a permutation of a million rows: half the bits of a place, six rounds."""


def group_id(purpose: Purpose, ordinal: int) -> str:
    """``group_id("train", 42) == "g0000000042"``."""
    assert 0 <= ordinal < 10**ORDINAL_DIGITS, ordinal
    return f"{_LETTERS[purpose]}{ordinal:0{ORDINAL_DIGITS}d}"


def trajectory_id(group: str, sibling: int) -> str:
    """``trajectory_id("g0000000042", 3) == "g0000000042-003"``."""
    assert 0 <= sibling < SIBLINGS_MAX, sibling
    return group + _SIBLINGS[sibling]


def parse_trajectory_id(trajectory: str) -> tuple[Purpose, int, int]:
    """Purpose, ordinal and sibling of a trajectory id. Raises SchemaError."""
    found = _TRAJECTORY.fullmatch(trajectory)
    if found is None:
        raise SchemaError(f"not a trajectory id: {trajectory[:60]!r}", path="$.trajectory")
    return _PURPOSES[found["letter"]], int(found["ordinal"]), int(found["sibling"])


def group_of(trajectory: str) -> str:
    """The group id of a trajectory id."""
    return trajectory.rpartition("-")[0]


def partition_of(ordinal: int, partitions: int) -> int:
    """The trajectories (and progress) partition of a group."""
    return ordinal % partitions


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from parts; equal parts give equal seeds on every machine."""
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def group_seed(run_seed: int, purpose: Purpose, ordinal: int) -> int:
    """The seed that a dispatch carries.

    For evaluation groups `ordinal` is the row of the evaluation data, so that every evaluation of
    a run draws the same random streams.
    """
    return derive_seed("group", run_seed, purpose, ordinal)


def trajectory_seed(seed: int, sibling: int) -> int:
    """The seed of one sibling, from its group's seed."""
    text = f"trajectory\x1f{seed}\x1f{sibling}"  # `derive_seed`, for once per trajectory.
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def call_seed(seed: int, prompt_digest: str, occurrence: int) -> int:
    """The seed of an agent's call, from its trajectory's seed, the digest of its prompt's token ids
    (`wire.sha256_hex` of int32, little endian) and how many calls had the same before: parallel
    calls draw the same streams, whichever comes first."""
    return derive_seed("call", seed, prompt_digest, occurrence)


def cut_seed(seed: int, token: int) -> int:
    """What the continuations of a trajectory from a token are the siblings of."""
    return derive_seed("fork", seed, token)


def source_of(purpose: Purpose, name: str) -> str:
    """Where a group comes from: ``source_of("eval", "hard") == "eval/hard"``; the purpose alone
    where tasks or evaluations have no names."""
    return f"{purpose}/{name}" if name else purpose


@lru_cache(maxsize=16)
def whole_shares(ratios: tuple[float, ...]) -> tuple[int, ...]:
    """The same ratios as whole numbers, exactly as they are written in decimals.

    ``whole_shares((0.5, 1.25)) == (2, 5)``.
    """
    exact = [Fraction(repr(ratio)) for ratio in ratios]
    scale = math.lcm(*(one.denominator for one in exact))
    whole = [int(one * scale) for one in exact]
    return tuple(one // math.gcd(*whole) for one in whole)


def next_task(shares: Sequence[int], given: Sequence[int]) -> int:
    """Which task the next group is of, `given` so many groups of each.

    Of those that have had less than their share by then, the one whose next group is due first, as
    in Balinski and Young's quota method: after any n groups each has more than n * share - 1 and
    fewer than n * share + 1. ``next_task((3, 1), (1, 0)) == 0``.
    """
    total, number = sum(shares), sum(given) + 1
    waiting = [one for one, share in enumerate(shares) if given[one] * total < number * share]
    return min(waiting, key=lambda one: (Fraction(given[one] + 1, shares[one]), one))


@lru_cache(maxsize=_PROMPTS_KEPT)
def prompt_index(run_seed: int, ordinal: int, rows: int) -> tuple[int, int]:
    """(data epoch, row) of the prompt that the group with this ordinal gets.

    Each data epoch is a keyed permutation of the rows: every row once per epoch, no state but the
    ordinal. Raises ValueError for an empty data set.
    """
    if rows < 1:
        raise ValueError("the data set has no rows")
    epoch, place = divmod(ordinal, rows)
    return epoch, _permute(place, rows, derive_seed("order", run_seed, epoch))


def _permute(place: int, rows: int, key: int) -> int:
    """A keyed permutation of range(rows): a Feistel network, walked until it lands inside."""
    half_bits = max(1, ((rows - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = place
    while True:
        left, right = value >> half_bits, value & mask
        for turn in range(_FEISTEL_ROUNDS):
            left, right = right, left ^ (_scramble(key, turn, right) & mask)
        value = (left << half_bits) | right
        if value < rows:
            return value


@lru_cache(maxsize=_SCRAMBLES_KEPT)
def _scramble(key: int, turn: int, half: int) -> int:
    return derive_seed(key, turn, half)
