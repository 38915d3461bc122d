"""Training groups that ended since the last step: many of them without a step are worth a word."""

from __future__ import annotations

from collections import Counter
from typing import Final

from dora_pipe.catalogue.account import Event, GroupEnded, StepEnded

BATCHES: Final = 4
"""So many batches' worth of groups that end without a step say that something may be wrong."""


class GroupsSinceStep:
    """Counts groups that made no step: filtered or failed; those that a stop cancels say nothing.

    Example: ``for event in account.round(round_, offset): since.happened(event)``
    """

    def __init__(self) -> None:
        self._fates: Counter[str] = Counter()
        self._why: dict[str, str] = {}
        """Of every fate, the newest."""

    @property
    def count(self) -> int:
        """Since the last step, or since the start."""
        return self._fates.total()

    def happened(self, event: Event) -> None:
        """What the account says."""
        match event:
            case StepEnded():
                self._fates.clear()
            case GroupEnded(fate="filtered" | "failed") if event.group.spec.purpose == "train":
                self._fates[event.fate] += 1
                self._why[event.fate] = event.why
            case _:
                pass

    def words(self, per_step: int | None) -> str:
        """Most of them, and why; empty while there are few."""
        if per_step is None or self.count < BATCHES * per_step:
            return ""
        ((fate, times),) = self._fates.most_common(1)
        return f"no step after {self.count} groups: {times} {fate} ({self._why[fate]})"
