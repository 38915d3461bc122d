"""Port of a teacher: log-probs of tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

Row = tuple[Sequence[int], Sequence[int]]
"""Token ids, and a mask: 1 where a log-prob is wanted, never for the first token."""

Scores = Generator[None, None, list[list[float]]]
"""Returns float32 log-probs by row; yields while waiting, so that callers can stop."""


class Teacher(Protocol):
    """A model that is not trained."""

    repeatable: bool
    """Bitwise repeatable; otherwise replay reads logged scores."""
    waits_for: str
    """Pending wait, in words."""

    def name(self) -> str:
        """Return the identity for a step's numerics fingerprint."""
        ...

    def logprobs(self, rows: Sequence[Row]) -> Scores:
        """Return log-probs by row. Raises PolicyError for unknown tokens, ResourceError,
        NonFinite."""
        ...
