"""The port of a teacher: log-probs of tokens that the policy sampled."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

Row = tuple[Sequence[int], Sequence[int]]
"""Token ids, and a mask: 1 where a log-prob is wanted. The first token never has one."""

Scores = Generator[None, None, list[list[float]]]
"""Ends with the log-probs of every row, float32; yields while it waits, so that whoever drives it
can end."""


class Teacher(Protocol):
    """A model that is not trained."""

    repeatable: bool
    """Whether it says the same again, bit for bit; what another said is taken from the files of the
    step when that is trained again."""
    waits_for: str
    """What it waits for, in words; empty for nothing."""

    def name(self) -> str:
        """What it is, in the fingerprint of a step."""
        ...

    def logprobs(self, rows: Sequence[Row]) -> Scores:
        """Of every row. Raises PolicyError for tokens it does not know, ResourceError where it
        cannot be asked, NonFinite."""
        ...
