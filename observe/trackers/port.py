"""The port of experiment trackers: rows of figures, each at a step; it decides nothing.

Rules every implementation keeps (one contract suite checks them):

1. `begin` comes first, once, and says how many rows of this run are there already: an earlier
   export wrote them, and they are not given again.
2. A row is there whole or not at all, and is out of this process when `step` returns.
3. The step of a row may be smaller than that of the row before: an evaluation is known later than
   the steps behind it.
4. Nothing is fetched from anywhere unless the user's environment says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

ID_HEX: Final = 16


@dataclass(frozen=True, slots=True)
class Spread:
    """How often each of a few whole numbers was there. Example: ``Spread(((0, 3), (1, 29)))``."""

    counts: tuple[tuple[int, int], ...]
    """(value, times), ascending by value; at least one."""


Figure = float | Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run that is tracked."""

    name: str
    started_ns: int
    """Of `run started`, wall clock: a name may be used again on another day."""
    config: Mapping[str, Any]
    """The resolved configuration as plain values; no key of it holds a secret."""

    @property
    def id(self) -> str:
        """A function of the run, for whoever has to tell it from others of its name."""
        text = f"{self.name}\x1f{self.started_ns}"
        return hashlib.sha256(text.encode()).hexdigest()[:ID_HEX]


class Tracker(Protocol):
    """Takes the rows of one run, in the order of its log."""

    def begin(self, run: TrackedRun) -> int:
        """Open it for a run; how many of its rows are there. Raises UsageError, ResourceError."""
        ...

    def step(self, step: int, figures: Mapping[str, Figure], *, at_ns: int) -> None:
        """Add a row, of a moment by wall clock. Raises ResourceError where it cannot be kept."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent, and allowed before `begin`."""
        ...
