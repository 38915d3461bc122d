"""Adds up what became of groups, so that a report needs none of those that have ended."""

from __future__ import annotations

from collections import Counter

from dora_pipe.audit.entries import GroupEntry
from dora_pipe.schemas.batch import staleness_of

Bucket = tuple[int, int]
"""Sampled tokens, both ends included."""


def bucket_of(tokens: int) -> Bucket:
    """The length bucket of so many sampled tokens: powers of two.

    Example: ``bucket_of(20) == (17, 32)``, ``bucket_of(1) == (1, 1)``, ``bucket_of(0) == (0, 0)``
    """
    if tokens == 0:
        return 0, 0
    high = 1 << (tokens - 1).bit_length()
    return high // 2 + 1, high


class Sums:
    """Sums over groups; what was added can be taken off again."""

    def __init__(self) -> None:
        self.groups: Counter[str] = Counter()
        """By fate, `open` among them."""
        self.trajectories: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        """Trained groups."""
        self.bounds: Counter[int] = Counter()
        """Trained groups by deadline minus version."""
        self.lengths: Counter[tuple[Bucket, str]] = Counter()
        """Training trajectories by length and fate."""
        self.length_tokens: Counter[Bucket] = Counter()
        self.epochs: Counter[int] = Counter()
        """Trajectories by the role epoch of the worker whose record counts."""
        self.epoch_tokens: Counter[int] = Counter()

    def add(self, group: GroupEntry, times: int = 1) -> None:
        """Count a group; -1 takes it off."""
        fate, results = group.fate or "open", group.results
        self.groups[fate] += times
        self.trajectories[fate] += times * len(results)
        self.tokens[fate] += times * group.tokens
        spec = group.spec
        if group.step is not None:
            self.staleness[staleness_of(group.step, spec.version)] += times
            self.bounds[spec.deadline - spec.version] += times
        for entry in group.requests.values():
            if entry.bound is not None:
                fact = entry.bound.fact
                self.epochs[fact.epoch] += times
                self.epoch_tokens[fact.epoch] += times * fact.tokens
        if spec.purpose == "train":
            for entry in group.requests.values():
                tokens = 0 if entry.bound is None else entry.bound.fact.tokens
                bucket = bucket_of(tokens)
                self.lengths[bucket, fate] += times
                self.length_tokens[bucket] += times * tokens
