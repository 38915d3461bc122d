"""Adds up what became of groups, so that a report needs none of those that have ended."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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


@dataclass(slots=True, kw_only=True)
class Sums:
    """Sums over groups; what was added can be taken off again."""

    groups: Counter[str] = field(default_factory=Counter)
    """By fate, `open` among them."""
    trajectories: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    """Trained groups."""
    bounds: Counter[int] = field(default_factory=Counter)
    """Trained groups by deadline minus version."""
    lengths: Counter[tuple[Bucket, str]] = field(default_factory=Counter)
    """Training trajectories by length and fate."""
    length_tokens: Counter[Bucket] = field(default_factory=Counter)
    epochs: Counter[int] = field(default_factory=Counter)
    """Trajectories by the role epoch of the worker whose record counts."""
    epoch_tokens: Counter[int] = field(default_factory=Counter)

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
