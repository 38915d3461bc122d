"""Decides what a turn leaves to the next one, so that the loop never stands still for long.

Two things that a round may have to do cost much and can wait for a turn that follows at once: its
plan, and to free what a commit has done with. A round whose plan is put off says `planned: false`;
the state keeps its trigger, and the next round plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from dora_pipe.orchestrator.fold import rounds_to_digest
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import StepCommitted

FOLDED_BYTES_MAX: Final = 256 * 1024
"""A round that folds more than this plans nothing: some thousand trajectories of a commit."""

UNSETTLED_MAX: Final = 1000
"""Nor does one whose digest has to hash more leaves and buckets than this."""

FREED: Final = 64
"""Groups that a turn frees, with their trajectories: half a millisecond."""


class Pace:
    """What was put off, and for how long."""

    def __init__(self) -> None:
        self._put_off = False
        self._spent: list[Any] = []

    def begin(self) -> None:
        """A turn begins."""
        del self._spent[-FREED:]

    def committing(self, state: State, record: StepCommitted) -> None:
        """A commit is about to be folded: its groups leave the state, but not all at once."""
        if state.training is not None:
            names: Iterable[str] = state.training.groups
            self._spent += [state.groups[name] for name in names]
        self._spent += record.groups

    def puts_off(self, state: State, folded: Sequence[bytes]) -> bool:
        """Whether this round, that folds so much, plans nothing; never two in a row."""
        heavy = sum(map(len, folded)) > FOLDED_BYTES_MAX
        digests = rounds_to_digest(state.rounds) == 0
        digests = digests and state.leaves.unsettled > UNSETTLED_MAX
        self._put_off = (heavy or digests) and not self._put_off
        return self._put_off
