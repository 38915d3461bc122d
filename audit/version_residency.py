"""How long workers hosted several versions at the same time, from rounds' times and `worker ready`.

Time is the orchestrator's round clock: between two rounds nothing changes. A worker counts as host
of a version from the round that folds its `worker ready` to the round that folds the next one, its
leaving or its fencing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Hosting:
    """Sums up hosted time while the rounds go by."""

    hosts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Versions by incarnation."""
    now_ns: int | None = None
    span_ns: int = 0
    several_ns: int = 0

    def advance(self, now_ns: int) -> None:
        """A round at this time; time that goes back adds nothing."""
        if self.now_ns is not None and now_ns > self.now_ns:
            self.span_ns += now_ns - self.now_ns
            if len({one for held in self.hosts.values() for one in held}) > 1:
                self.several_ns += now_ns - self.now_ns
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
    def several_seconds(self) -> float:
        """Seconds in which at least two versions were hosted."""
        return self.several_ns / 1e9
