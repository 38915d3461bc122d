"""Average number of requests that need no engine slot.

A plain count swings between all and none if turns end together, and a minimum duration would miss
short waits.
"""

from __future__ import annotations

import math
from typing import Final

from dora_pipe.core.pure.machine import BUS_TURN_NS

AVERAGED_NS: Final = 10 * BUS_TURN_NS
"""Time constant: a value this old has weight 1/e."""

NEVER_NS: Final = 2**63 - 1


class OffEngine:
    """Requests that need no slot, with their average number.

    Example: 4 requests that are off the engine half of the time: ``mean(now_ns) == 2``.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._mean = 0.0
        self._at_ns = 0

    def __len__(self) -> int:
        return len(self._keys)

    def begin(self, now_ns: int) -> None:
        self._mean, self._at_ns = 0.0, now_ns

    def add(self, key: str, now_ns: int) -> None:
        self._advance(now_ns)
        self._keys.add(key)

    def discard(self, key: str, now_ns: int) -> None:
        self._advance(now_ns)
        self._keys.discard(key)

    def mean(self, now_ns: int, most: int) -> int:
        self._advance(now_ns)
        self._mean = min(self._mean, float(most))
        return int(self._mean + 0.5)

    def reaches_ns(self, count: int) -> int:
        """Return when `mean` will reach `count` without further changes; `NEVER_NS` if it will
        not."""
        to, mean = len(self._keys), self._mean
        edge = count - 0.5 if to > mean else count + 0.5
        if not min(mean, to) < edge < max(mean, to):
            return NEVER_NS
        return self._at_ns + math.ceil(AVERAGED_NS * math.log((mean - to) / (edge - to)))

    def _advance(self, now_ns: int) -> None:
        kept = math.exp((self._at_ns - now_ns) / AVERAGED_NS)
        self._mean = len(self._keys) + kept * (self._mean - len(self._keys))
        self._at_ns = now_ns
