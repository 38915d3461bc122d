"""Speed of modeled hardware; pure.

An engine (`Sharing`) advances all active requests at one pace, `tau(active)` seconds per token, so
a heap finds the next to end. A moved request resumes after its KV cache is transferred or its
prefix prefilled.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.rounds import Assign, ScheduledRequest

MOVE_LATENCY_S: Final = 0.2
"""Minimum pause of a move."""

NEVER_S: Final = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """Speed of a worker. Example: ``EngineRates(tau_s=0.021, rise=0.25, full=80)``"""

    tau_s: float
    """Seconds per token of a single request."""
    rise: float = 0.0
    """Relative slowdown of a full engine."""
    full: int = 1
    prefill_tokens_s: float = 50_000.0
    """Prefilled tokens per second; nothing else runs meanwhile."""
    kv_bytes: int = 262_144
    """KV cache per token: 256 KiB for Qwen2.5-32B."""
    link_bytes_s: float = 25e9
    """Transfer rate of KV caches between workers."""
    load_s: float = 5.0
    """Duration of loading a version."""

    def tau(self, active: int) -> float:
        """Return seconds per token."""
        return self.tau_s * (1.0 + self.rise * active / self.full)

    def prefill_s(self, tokens: int) -> float:
        return tokens / self.prefill_tokens_s

    def move_s(self, tokens: int) -> float:
        return MOVE_LATENCY_S + tokens * self.kv_bytes / self.link_bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRates:
    """Trainer: a step takes `fixed_s` plus `token_s` per token."""

    fixed_s: float
    token_s: float = 0.0

    def step_s(self, *, tokens: int) -> float:
        return self.fixed_s + self.token_s * tokens


class Sharing:
    """Running batch at one pace; call `advance` no later than `next_s`.

    Example::

        batch = Sharing(EngineRates(tau_s=0.02))
        batch.add("a", 100)
        assert batch.next_s() == 2.0 and batch.advance(2.0) == ["a"]
    """

    def __init__(self, rates: EngineRates, *, now_s: float = 0.0) -> None:
        self.rates = rates
        self.now_s = now_s
        self.served = 0.0
        """Tokens of a request that was always active."""
        self.slot_s = 0.0
        """Active requests integrated over time."""
        self._stall_s = 0.0
        self._ends: dict[str, float] = {}
        self._starts: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, name: str, tokens: float, *, prefill: int = 0) -> None:
        """Add a request; its `prefill` tokens stall the batch."""
        assert name not in self._ends, f"{name} is active already"
        self._starts[name] = self.served
        self._ends[name] = end = self.served + tokens
        heapq.heappush(self._heap, (end, name))
        self._stall_s += self.rates.prefill_s(prefill)

    def remove(self, name: str) -> float:
        """Remove a request; return the tokens it received."""
        del self._ends[name]
        return self.served - self._starts.pop(name)

    def next_s(self) -> float:
        """Return the next end, or `NEVER_S`."""
        self._settle()
        if not self._heap:
            return NEVER_S
        remaining = max(0.0, self._heap[0][0] - self.served)
        return self.now_s + self._stall_s + remaining * self._tau_s()

    def advance(self, now_s: float) -> list[str]:
        """Advance; return the ended requests."""
        finished: list[str] = []
        while self._heap and self.next_s() <= now_s + 1e-9:
            self._pass(self.next_s())
            end, name = heapq.heappop(self._heap)
            self.served = max(self.served, end)
            del self._ends[name]
            del self._starts[name]
            finished.append(name)
        self._pass(now_s)
        return finished

    def _pass(self, now_s: float) -> None:
        span = now_s - self.now_s
        if span <= 0:
            return
        active = len(self._ends)
        self.now_s = now_s
        if not active:
            self._stall_s = 0.0
            return
        self.slot_s += active * span
        stalled = min(self._stall_s, span)
        self._stall_s -= stalled
        self.served += (span - stalled) / self._tau_s()

    def _tau_s(self) -> float:
        return self.rates.tau(len(self._ends))

    def _settle(self) -> None:
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """Modeled worker. Example: ``WorkerSize(name="w00", slots=80, prefetch=8)``"""

    name: str
    slots: int
    prefetch: int


@dataclass(slots=True, kw_only=True)
class Left:
    """Progress in tokens."""

    left: float
    done: float = 0.0


class ModelledWorker:
    """Modeled worker; `lefts` has all progress."""

    def __init__(
        self,
        size: WorkerSize,
        rates: EngineRates,
        lefts: MutableMapping[str, Left],
        *,
        incarnation: int,
        prompt_tokens: int = 0,
    ) -> None:
        self.size = size
        self.incarnation = incarnation
        self.batch = Sharing(rates)
        self.assigned: Assign | None = None
        """Version being loaded; None if ready."""
        self.ready_s = NEVER_S
        """End of the load."""
        self.loads = 0
        self.running: dict[str, ScheduledRequest] = {}
        self._lefts = lefts
        self._prompt_tokens = prompt_tokens
        self._waiting: deque[ScheduledRequest] = deque()
        self._arriving: list[tuple[float, str, ScheduledRequest]] = []

    def assign(self, decision: Assign, now_s: float) -> None:
        """Load another version."""
        self.assigned = decision
        assert not (self.running or self._waiting or self._arriving), "it has open requests"
        self.ready_s = now_s + self.batch.rates.load_s
        self.loads += 1

    def ready(self, now_s: float) -> Assign | None:
        """Return a finished assignment once."""
        if self.assigned is None or self.ready_s > now_s + 1e-9:
            return None
        assigned, self.assigned, self.ready_s = self.assigned, None, NEVER_S
        return assigned

    def place(self, request: ScheduledRequest, now_s: float) -> None:
        """Queue a request, after its KV cache arrived."""
        if request.kv is None:
            self._waiting.append(request)
        else:
            arrives_s = now_s + self.batch.rates.move_s(round(self._left(request).done))
            heapq.heappush(self._arriving, (arrives_s, request.trajectory, request))
        self._fill(now_s)

    def holds(self, trajectory: str) -> bool:
        """Report whether a request is open here."""
        waiting = any(entry.trajectory == trajectory for entry in self._waiting)
        return (
            trajectory in self.running
            or waiting
            or any(name == trajectory for _, name, _ in self._arriving)
        )

    def release(self, trajectory: str) -> Resume | None:
        """Release a request; return its progress."""
        if trajectory in self.running:
            del self.running[trajectory]
            here = self.batch.remove(trajectory)
            progress = self._lefts[trajectory]
            progress.left, progress.done = progress.left - here, progress.done + here
            return Resume(tokens=max(1, round(progress.done)), partition=0, offset=0)
        waiting = [entry for entry in self._waiting if entry.trajectory == trajectory]
        waiting += [entry[2] for entry in self._arriving if entry[1] == trajectory]
        self._waiting = deque(entry for entry in self._waiting if entry.trajectory != trajectory)
        self._arriving = [entry for entry in self._arriving if entry[1] != trajectory]
        heapq.heapify(self._arriving)
        return waiting[0].resume if waiting else None

    def next_s(self) -> float:
        """Return the time of the next event here."""
        arrives_s = self._arriving[0][0] if self._arriving else NEVER_S
        return min(self.batch.next_s(), self.ready_s, arrives_s)

    def advance(self, now_s: float) -> list[ScheduledRequest]:
        """Advance; return the ended requests."""
        requests: list[ScheduledRequest] = []
        while True:
            arrives_s = self._arriving[0][0] if self._arriving else NEVER_S
            until_s = min(self.batch.next_s(), arrives_s)
            until_s = min(until_s, now_s)
            for name in self.batch.advance(until_s):
                requests.append(self.running.pop(name))
            self._fill(until_s)
            if until_s >= now_s:
                return requests

    def _fill(self, now_s: float) -> None:
        while self._arriving and self._arriving[0][0] <= now_s + 1e-9:
            request = heapq.heappop(self._arriving)[2]
            self._waiting.append(request)
        while self._waiting and len(self.running) < self.size.slots:
            request = self._waiting.popleft()
            progress = self._left(request)
            self.running[request.trajectory] = request
            prefill = self._prefill(request, progress)
            self.batch.add(request.trajectory, progress.left, prefill=prefill)

    def _prefill(self, request: ScheduledRequest, progress: Left) -> int:
        return self._prompt_tokens + round(progress.done) if request.kv is None else 0

    def _left(self, request: ScheduledRequest) -> Left:
        return self._lefts[request.trajectory]
