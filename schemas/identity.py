"""Deterministic ids, partitions, seeds and prompt order, from ordinals.

A group id is a letter (`g` train, `e` evaluation) and the zero-padded dispatch ordinal; separate
counters keep evaluations from changing training prompts. Trajectory ids add the sample index. Seeds
exclude attempt and worker, so a regenerated trajectory is the same.
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
"""Purpose of a group; evaluation groups never enter a batch."""

ORDINAL_DIGITS = 10
SAMPLE_DIGITS = 3
SAMPLES_MAX = 10**SAMPLE_DIGITS
"""Maximum trajectories per group."""

_LETTERS: dict[Purpose, str] = {"train": "g", "eval": "e"}
_PURPOSES: dict[str, Purpose] = {"g": "train", "e": "eval"}
_TRAJECTORY = re.compile(r"(?P<letter>[ge])(?P<ordinal>[0-9]{10})-(?P<sample>[0-9]{3})")
_SAMPLES = [f"-{sample:0{SAMPLE_DIGITS}d}" for sample in range(SAMPLES_MAX)]
_FEISTEL_ROUNDS = 6
_PROMPTS_KEPT = 4096
"""Cache size; prompts of an ordinal are requested repeatedly."""
_SCRAMBLES_KEPT = 8192
"""Enough for a permutation of a million rows: half the bits, six rounds."""


def group_id(purpose: Purpose, ordinal: int) -> str:
    """Return the group id: ``group_id("train", 42) == "g0000000042"``."""
    assert 0 <= ordinal < 10**ORDINAL_DIGITS, ordinal
    return f"{_LETTERS[purpose]}{ordinal:0{ORDINAL_DIGITS}d}"


def trajectory_id(group: str, sample: int) -> str:
    """Return the trajectory id: ``trajectory_id("g0000000042", 3) == "g0000000042-003"``."""
    assert 0 <= sample < SAMPLES_MAX, sample
    return group + _SAMPLES[sample]


def parse_trajectory_id(trajectory: str) -> tuple[Purpose, int, int]:
    """Return purpose, ordinal and sample index. Raises SchemaError."""
    match = _TRAJECTORY.fullmatch(trajectory)
    if match is None:
        raise SchemaError(f"not a trajectory id: {trajectory[:60]!r}", path="$.trajectory")
    return _PURPOSES[match["letter"]], int(match["ordinal"]), int(match["sample"])


def group_of(trajectory: str) -> str:
    """Return the group id of a trajectory id."""
    return trajectory.rpartition("-")[0]


def partition_of(ordinal: int, partitions: int) -> int:
    """Return a group's partition of trajectories and progress."""
    return ordinal % partitions


def derive_seed(*parts: int | str) -> int:
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1


def group_seed(run_seed: int, purpose: Purpose, ordinal: int) -> int:
    """Return the seed of a dispatch.

    For evaluation groups `ordinal` is the data row, so every evaluation of a run uses the same
    random streams.
    """
    return derive_seed("group", run_seed, purpose, ordinal)


def trajectory_seed(seed: int, sample: int) -> int:
    text = f"trajectory\x1f{seed}\x1f{sample}"  # inlined `derive_seed`, once per trajectory
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def call_seed(seed: int, prompt_digest: str, occurrence: int) -> int:
    """Return the seed of an agent's call.

    `prompt_digest` is `wire.sha256_hex` of the prompt ids (int32, little endian); `occurrence`
    counts earlier calls with that prompt. Parallel calls thus get the same streams in any order.
    """
    return derive_seed("call", seed, prompt_digest, occurrence)


def cut_seed(seed: int, token: int) -> int:
    """Return the group seed for continuations of a trajectory from a token."""
    return derive_seed("fork", seed, token)


def source_of(purpose: Purpose, name: str) -> str:
    """Return the source of a group: ``source_of("eval", "hard") == "eval/hard"``; only the purpose
    without a name."""
    return f"{purpose}/{name}" if name else purpose


@lru_cache(maxsize=16)
def whole_shares(ratios: tuple[float, ...]) -> tuple[int, ...]:
    """Return decimal ratios as exact integers: ``whole_shares((0.5, 1.25)) == (2, 5)``."""
    exact = [Fraction(repr(ratio)) for ratio in ratios]
    scale = math.lcm(*(ratio.denominator for ratio in exact))
    scaled = [int(ratio * scale) for ratio in exact]
    return tuple(share // math.gcd(*scaled) for share in scaled)


def next_task(shares: Sequence[int], given: Sequence[int]) -> int:
    """Return the task of the next group, after `given` groups of each.

    Quota method of Balinski and Young: of the tasks below their share, the one whose next group is
    due first. After n groups each task has between n * share - 1 and n * share + 1. ``next_task((3,
    1), (1, 0)) == 0``.
    """
    total, number = sum(shares), sum(given) + 1
    waiting = [task for task, share in enumerate(shares) if given[task] * total < number * share]
    return min(waiting, key=lambda task: (Fraction(given[task] + 1, shares[task]), task))


@lru_cache(maxsize=_PROMPTS_KEPT)
def prompt_index(run_seed: int, ordinal: int, rows: int) -> tuple[int, int]:
    """Return (data epoch, row) of the prompt for this ordinal.

    Each data epoch is a keyed permutation of the rows. Raises ValueError for an empty data set.
    """
    if rows < 1:
        raise ValueError("the data set has no rows")
    epoch, index = divmod(ordinal, rows)
    return epoch, _permute(index, rows, derive_seed("order", run_seed, epoch))


def _permute(index: int, rows: int, key: int) -> int:
    """Return a keyed permutation of range(rows): a Feistel network with cycle walking."""
    half_bits = max(1, ((rows - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = index
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
