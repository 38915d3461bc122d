"""How long workers hosted which versions, from rounds' times and `worker ready`; decides nothing.

Time is the orchestrator's round clock: between two rounds nothing changes. A worker counts as host
of a version from the round that folds its `worker ready` to the round that folds the next one, its
leaving or its fencing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import combinations


class Hosting:
    """Sums up hosted time while the rounds go by."""

    def __init__(self) -> None:
        self._hosts: dict[int, int] = {}
        self._now_ns: int | None = None
        self._worker_ns: Counter[int] = Counter()
        self._pair_ns: Counter[tuple[int, int]] = Counter()
        self._span_ns = 0
        self._several_ns = 0

    def advance(self, now_ns: int) -> None:
        """A round at this time; time that goes back adds nothing."""
        if self._now_ns is not None and now_ns > self._now_ns:
            span_ns = now_ns - self._now_ns
            self._span_ns += span_ns
            for epoch in self._hosts:
                self._worker_ns[epoch] += span_ns
            versions = sorted(set(self._hosts.values()))
            self._several_ns += span_ns if len(versions) > 1 else 0
            for pair in combinations(versions, 2):
                self._pair_ns[pair] += span_ns
        self._now_ns = now_ns if self._now_ns is None else max(now_ns, self._now_ns)

    def ready(self, epoch: int, version: int) -> None:
        """This incarnation hosts a version from now on."""
        self._hosts[epoch] = version

    def keep(self, epochs: Collection[int]) -> None:
        """Incarnations that are not among these host nothing any more."""
        self._hosts = {epoch: one for epoch, one in self._hosts.items() if epoch in epochs}

    @property
    def seconds(self) -> float:
        """From the first round to the last."""
        return self._span_ns / 1e9

    @property
    def worker_seconds(self) -> dict[int, float]:
        """Seconds in which an incarnation hosted something, by its role epoch."""
        return {epoch: ns / 1e9 for epoch, ns in sorted(self._worker_ns.items())}

    @property
    def pairs(self) -> dict[tuple[int, int], float]:
        """Seconds in which both versions of a pair were hosted, by different workers."""
        return {pair: ns / 1e9 for pair, ns in sorted(self._pair_ns.items())}

    @property
    def several_seconds(self) -> float:
        """Seconds in which at least two versions were hosted."""
        return self._several_ns / 1e9
