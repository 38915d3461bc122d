"""How long workers hosted which versions, from rounds' times and `worker ready`.

It decides which pairs of versions are told one by one: those that were hosted together for longest.

Time is the orchestrator's round clock: between two rounds nothing changes. A worker counts as host
of a version from the round that folds its `worker ready` to the round that folds the next one, its
leaving or its fencing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import combinations
from typing import Final

PAIRS_MAX: Final = 1000
"""Pairs of versions kept one by one, beside those that are hosted now; of the others the sum."""


@dataclass(slots=True, kw_only=True)
class Hosting:
    """Sums up hosted time while the rounds go by."""

    hosts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Versions by incarnation."""
    now_ns: int | None = None
    pair_ns: Counter[tuple[int, int]] = field(default_factory=Counter)
    span_ns: int = 0
    several_ns: int = 0
    other_pairs: int = 0
    other_ns: int = 0

    def advance(self, now_ns: int) -> None:
        """A round at this time; time that goes back adds nothing."""
        if self.now_ns is not None and now_ns > self.now_ns:
            span_ns = now_ns - self.now_ns
            self.span_ns += span_ns
            versions = sorted({one for held in self.hosts.values() for one in held})
            self.several_ns += span_ns if len(versions) > 1 else 0
            for pair in combinations(versions, 2):
                self.pair_ns[pair] += span_ns
            if len(self.pair_ns) > 2 * PAIRS_MAX:
                self._let_go(set(versions))
        self.now_ns = now_ns if self.now_ns is None else max(now_ns, self.now_ns)

    def ready(self, epoch: int, *versions: int) -> None:
        """This incarnation hosts these versions from now on; one, unless it hosts several."""
        self.hosts[epoch] = versions

    def keep(self, epochs: Collection[int]) -> None:
        """Incarnations that are not among these host nothing any more."""
        self.hosts = {epoch: one for epoch, one in self.hosts.items() if epoch in epochs}

    @property
    def seconds(self) -> float:
        """From the first round to the last."""
        return self.span_ns / 1e9

    @property
    def pairs(self) -> dict[tuple[int, int], float]:
        """Seconds in which both versions of a pair were hosted, by whichever workers.

        Of a long run the longest; see `others`.
        """
        return {pair: ns / 1e9 for pair, ns in sorted(self.pair_ns.items())}

    @property
    def others(self) -> tuple[int, float]:
        """How many pairs are not among `pairs`, and their seconds."""
        return self.other_pairs, self.other_ns / 1e9

    @property
    def several_seconds(self) -> float:
        """Seconds in which at least two versions were hosted."""
        return self.several_ns / 1e9

    def _let_go(self, present: set[int]) -> None:
        """Keep the longest of the pairs that are over; of equal ones the newest."""
        over = [pair for pair in self.pair_ns if not present.issuperset(pair)]
        over.sort(key=lambda pair: (self.pair_ns[pair], pair))
        for pair in over[: max(0, len(over) - PAIRS_MAX)]:
            self.other_pairs += 1
            self.other_ns += self.pair_ns.pop(pair)
