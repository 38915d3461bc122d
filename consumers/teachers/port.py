"""Port of a teacher: log-probs of tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

Row = tuple[Sequence[int], Sequence[int]]
"""Token ids, and a mask: 1 where a log-prob is wanted. The first token never has one."""

Scores = Generator[None, None, list[list[float]]]
"""Returns the float32 log-probs of every row; yields while waiting, so that the caller can stop."""


class Teacher(Protocol):
    """A model that is not trained."""

    repeatable: bool
    """True if scores are bitwise repeatable; otherwise replay reads the logged scores."""
    waits_for: str
    """Description of a pending wait; empty if none."""

    def name(self) -> str:
        """Return the identity for a step's numerics fingerprint."""
        ...

    def logprobs(self, rows: Sequence[Row]) -> Scores:
        """Return the log-probs of every row. Raises PolicyError for unknown tokens, ResourceError
        if unavailable, NonFinite.
        """
        ...
