"""How many requests need no slot, on average over about `AVERAGED_NS`; decides nothing.

The average is what keeps slots busy: of those who are off the engine for a tenth of a second every
second, a tenth are off at any time, whoever they are. A mere count says now 64 and now none where
all turns end together, and one of those who have been off for a while sees no short wait at all.
"""

from __future__ import annotations

import math
from typing import Final

from dora_pipe.core.runtime import BUS_TURN_NS

AVERAGED_NS: Final = 10 * BUS_TURN_NS
"""What was so long ago counts 1/e as much as what is."""

NEVER_NS: Final = 2**63 - 1
"""Later than anything."""


class OffEngine:
    """Who needs no slot, and how many have needed none lately.

    Example: 4 requests of which each is away half of the time: ``mean(now_ns) == 2``.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._mean = 0.0
        self._at_ns = 0

    def __len__(self) -> int:
        return len(self._keys)

    def begin(self, now_ns: int) -> None:
        """What was before does not count."""
        self._mean, self._at_ns = 0.0, now_ns

    def add(self, key: str, now_ns: int) -> None:
        """This request needs no slot from now on."""
        self._advance(now_ns)
        self._keys.add(key)

    def discard(self, key: str, now_ns: int) -> None:
        """This one needs one, or has ended."""
        self._advance(now_ns)
        self._keys.discard(key)

    def mean(self, now_ns: int, most: int) -> int:
        """How many on average, in whole requests; never more than there are (`most`)."""
        self._advance(now_ns)
        self._mean = min(self._mean, float(most))
        return int(self._mean + 0.5)

    def reaches_ns(self, count: int) -> int:
        """When `mean`, as it was last asked, will be `count` if nothing changes; `NEVER_NS` if it
        will not be."""
        to, mean = len(self._keys), self._mean
        edge = count - 0.5 if to > mean else count + 0.5
        if not min(mean, to) < edge < max(mean, to):
            return NEVER_NS
        return self._at_ns + math.ceil(AVERAGED_NS * math.log((mean - to) / (edge - to)))

    def _advance(self, now_ns: int) -> None:
        kept = math.exp((self._at_ns - now_ns) / AVERAGED_NS)
        self._mean = len(self._keys) + kept * (self._mean - len(self._keys))
        self._at_ns = now_ns
