"""Decides when the orchestrator looks for garbage: where its loop waits, and never in a turn.

What it holds has no cycles; those that come, of errors above all, are few. But to look for them
takes as long as a turn, of which it may be the longest part.
"""

from __future__ import annotations

import gc
from typing import Final

GARBAGE_MAX: Final = 100_000
"""New objects, less those that have gone, after which a turn looks for cycles after all: some turns
without a wait in between."""

FULL_EVERY: Final = 600
"""Waits from one look at everything to the next: a minute."""


def settle_memory() -> None:
    """What a process has when it becomes the orchestrator, modules above all, is for ever: the
    garbage collector looks at it once more and never again. To look at it takes longer than a
    round. What comes is looked at by `Tidying`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_MAX, *gc.get_threshold()[1:])


class Tidying:
    """Looks for garbage whenever it is called: at what is new, and now and then at everything."""

    def __init__(self) -> None:
        self._waits = 0

    def __call__(self) -> None:
        """The loop waits."""
        self._waits += 1
        gc.collect(1 if self._waits % FULL_EVERY else 2)
