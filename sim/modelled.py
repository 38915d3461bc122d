"""Decides how fast modelled hardware generates and trains; pure, with time as an argument.

An engine advances all its active requests at one pace: a token takes `tau(active)` seconds,
whatever the others' lengths. So the work done for one request since it entered equals that done
for any other, and the next to end is the one with the least left: a heap, no loop over tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MOVE_LATENCY_S: Final = 0.2
"""A request stands still at least so long while it goes to another worker: two messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """The speed of a worker. Example: ``EngineRates(tau_s=0.021, rise=0.25, full=80)``."""

    tau_s: float
    """Seconds per token of a request that is alone."""
    rise: float = 0.0
    """A full engine takes (1 + rise) times as long for a token."""
    full: int = 1
    """Active requests of a full engine."""
    prefill_tokens_s: float = 50_000.0
    """Prompt or prefix tokens that are prefilled per second; nothing else runs meanwhile."""
    kv_bytes: int = 262_144
    """KV cache per token: 256 KiB for Qwen2.5-32B."""
    link_bytes_s: float = 25e9
    """KV caches go from worker to worker at this rate."""
    load_s: float = 5.0
    """Loading the weights of a version."""

    def tau(self, active: int) -> float:
        """Seconds per token while so many requests are active."""
        return self.tau_s * (1.0 + self.rise * active / self.full)

    def prefill_s(self, tokens: int) -> float:
        """Seconds of prefilling so many tokens."""
        return tokens / self.prefill_tokens_s

    def move_s(self, tokens: int) -> float:
        """Seconds for which a request of so many tokens stands still while it moves."""
        return MOVE_LATENCY_S + tokens * self.kv_bytes / self.link_bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRates:
    """The speed of a trainer: a step takes `fixed_s` and `token_s` per token."""

    fixed_s: float
    token_s: float = 0.0
    sample_s: float = 0.0

    def step_s(self, *, tokens: int, samples: int = 0) -> float:
        """Seconds of a step."""
        return self.fixed_s + self.token_s * tokens + self.sample_s * samples


NEVER_S: Final = float("inf")


class Sharing:
    """The running batch of one engine: requests with tokens left, at one common pace.

    Time only goes forward; `advance` must be called with `next_s` at the latest, so that every
    completion is seen at its time.

    Example::

        batch = Sharing(EngineRates(tau_s=0.02))
        batch.add("a", 100)
        assert batch.next_s() == 2.0 and batch.advance(2.0) == ["a"]
    """

    def __init__(self, rates: EngineRates, *, now_s: float = 0.0) -> None:
        self.rates = rates
        self.now_s = now_s
        self.served = 0.0
        """Tokens that a request would have which had been active all the time."""
        self.busy_s = 0.0
        """Time with at least one active request."""
        self.slot_s = 0.0
        """Active requests, integrated over time."""
        self.slower = 1.0
        """How many times as long a token takes just now: cores or GPUs are shared with others."""
        self._stall_s = 0.0
        self._ends: dict[str, float] = {}
        self._starts: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def __contains__(self, name: str) -> bool:
        return name in self._ends

    def __iter__(self) -> Iterator[str]:
        return iter(self._ends)

    def add(self, name: str, tokens: float, *, prefill: int = 0) -> None:
        """A request with so many tokens left enters; its `prefill` tokens stall the batch."""
        assert name not in self._ends, f"{name} is active already"
        self._starts[name] = self.served
        self._ends[name] = end = self.served + tokens
        heapq.heappush(self._heap, (end, name))
        self._stall_s += self.rates.prefill_s(prefill)

    def remove(self, name: str) -> float:
        """A request leaves before its end; the tokens that it got here."""
        del self._ends[name]
        return self.served - self._starts.pop(name)

    def sampled(self, name: str) -> float:
        """Tokens that an active request got here."""
        return self.served - self._starts[name]

    def stall(self, seconds: float) -> None:
        """Nobody gets a token for so long: new weights, a prefix that is prefilled again."""
        self._stall_s += seconds

    def skip(self, now_s: float) -> None:
        """Time passes in which the engine does not exist: its GPUs do something else."""
        self.now_s = max(self.now_s, now_s)

    def tokens(self) -> float:
        """Tokens that all active requests together got here."""
        return self.served * len(self._starts) - sum(self._starts.values())

    def next_s(self) -> float:
        """When the next request ends, if nothing else happens; `NEVER_S` without any."""
        self._settle()
        if not self._heap:
            return NEVER_S
        left = max(0.0, self._heap[0][0] - self.served)
        return self.now_s + self._stall_s + left * self._tau_s()

    def advance(self, now_s: float) -> list[str]:
        """Go on until then; the requests that end there, which leave."""
        found: list[str] = []
        while self._heap and self.next_s() <= now_s + 1e-9:
            self._pass(self.next_s())
            end, name = heapq.heappop(self._heap)
            self.served = max(self.served, end)
            del self._ends[name]
            del self._starts[name]
            found.append(name)
        self._pass(now_s)
        return found

    def _pass(self, now_s: float) -> None:
        """Time passes without a completion."""
        span = now_s - self.now_s
        if span <= 0:
            return
        active = len(self._ends)
        self.now_s = now_s
        if not active:
            self._stall_s = 0.0
            return
        self.busy_s += span
        self.slot_s += active * span
        stalled = min(self._stall_s, span)
        self._stall_s -= stalled
        self.served += (span - stalled) / self._tau_s()

    def _tau_s(self) -> float:
        return self.slower * self.rates.tau(len(self._ends))

    def _settle(self) -> None:
        """Forget heap entries of requests that were removed."""
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
