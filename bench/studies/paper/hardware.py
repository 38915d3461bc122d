"""Speed of modelled hardware that generates and trains; pure, with time as an argument.

An engine (`Sharing`) advances all its active requests at one pace: a token takes `tau(active)`
seconds, whatever the others' lengths. So the work done for one request since it entered equals that
done for any other, and the next to end is the one with the least left: a heap, no loop over tokens.

A worker obeys decisions as production's does. Requests wait in it until a slot is free, run in a
`Sharing`, and come back as what control would say of them. A request that leaves before its end
takes along what it has left; it goes on elsewhere after its KV cache has been moved or its prefix
prefilled.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Final

from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.rounds import Assign, PlacedRequest

MOVE_LATENCY_S: Final = 0.2
"""A request stands still at least so long while it goes to another worker: two messages."""

NEVER_S: Final = float("inf")


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

    def step_s(self, *, tokens: int) -> float:
        """Seconds of a step."""
        return self.fixed_s + self.token_s * tokens


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
        self.slot_s = 0.0
        """Active requests, integrated over time."""
        self._stall_s = 0.0
        self._ends: dict[str, float] = {}
        self._starts: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._ends)

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
        self.slot_s += active * span
        stalled = min(self._stall_s, span)
        self._stall_s -= stalled
        self.served += (span - stalled) / self._tau_s()

    def _tau_s(self) -> float:
        return self.rates.tau(len(self._ends))

    def _settle(self) -> None:
        """Forget heap entries of requests that were removed."""
        while self._heap and self._ends.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSize:
    """A modelled worker. Example: ``WorkerSize(name="w00", slots=80, prefetch=8)``."""

    name: str
    slots: int
    prefetch: int


@dataclass(slots=True, kw_only=True)
class Left:
    """How far a request has come; tokens."""

    left: float
    done: float = 0.0


class ModelledWorker:
    """See the head of this file. `lefts` holds every open request's progress, for all workers."""

    def __init__(
        self,
        size: WorkerSize,
        rates: EngineRates,
        lefts: MutableMapping[str, Left],
        *,
        epoch: int,
        prompt_tokens: int = 0,
    ) -> None:
        self.size = size
        self.epoch = epoch
        self.batch = Sharing(rates)
        self.assigned: Assign | None = None
        """What it loads; None when it hosts what it was assigned."""
        self.ready_s = NEVER_S
        """When the load ends."""
        self.loads = 0
        self.running: dict[str, PlacedRequest] = {}
        self._lefts = lefts
        self._prompt_tokens = prompt_tokens
        self._waiting: deque[PlacedRequest] = deque()
        self._arriving: list[tuple[float, str, PlacedRequest]] = []

    def assign(self, decision: Assign, now_s: float) -> None:
        """Load another version."""
        self.assigned = decision
        assert not (self.running or self._waiting or self._arriving), "it has open requests"
        self.ready_s = now_s + self.batch.rates.load_s
        self.loads += 1

    def ready(self, now_s: float) -> Assign | None:
        """The assignment that has been loaded by now, once."""
        if self.assigned is None or self.ready_s > now_s + 1e-9:
            return None
        found, self.assigned, self.ready_s = self.assigned, None, NEVER_S
        return found

    def place(self, request: PlacedRequest, now_s: float) -> None:
        """A request waits for a slot; one that was moved here first waits for its KV cache."""
        if request.kv is None:
            self._waiting.append(request)
        else:
            arrives_s = now_s + self.batch.rates.move_s(round(self._left(request).done))
            heapq.heappush(self._arriving, (arrives_s, request.trajectory, request))
        self._fill(now_s)

    def holds(self, trajectory: str) -> bool:
        """Whether a request is here and has not ended."""
        waiting = any(one.trajectory == trajectory for one in self._waiting)
        return (
            trajectory in self.running
            or waiting
            or any(name == trajectory for _, name, _ in self._arriving)
        )

    def release(self, trajectory: str) -> Resume | None:
        """Let go of a request: where it goes on from, None if it never ran."""
        if trajectory in self.running:
            del self.running[trajectory]
            here = self.batch.remove(trajectory)
            left = self._lefts[trajectory]
            left.left, left.done = left.left - here, left.done + here
            return Resume(tokens=max(1, round(left.done)), partition=0, offset=0)
        waiting = [one for one in self._waiting if one.trajectory == trajectory]
        waiting += [one[2] for one in self._arriving if one[1] == trajectory]
        self._waiting = deque(one for one in self._waiting if one.trajectory != trajectory)
        self._arriving = [one for one in self._arriving if one[1] != trajectory]
        heapq.heapify(self._arriving)
        return waiting[0].resume if waiting else None

    def next_s(self) -> float:
        """When something happens here, if nobody else does anything."""
        arrives_s = self._arriving[0][0] if self._arriving else NEVER_S
        return min(self.batch.next_s(), self.ready_s, arrives_s)

    def advance(self, now_s: float) -> list[PlacedRequest]:
        """Go on until then; the requests that ended, each at its own time."""
        found: list[PlacedRequest] = []
        while True:
            arrives_s = self._arriving[0][0] if self._arriving else NEVER_S
            until_s = min(self.batch.next_s(), arrives_s)
            until_s = min(until_s, now_s)
            for name in self.batch.advance(until_s):
                found.append(self.running.pop(name))
            self._fill(until_s)
            if until_s >= now_s:
                return found

    def _fill(self, now_s: float) -> None:
        while self._arriving and self._arriving[0][0] <= now_s + 1e-9:
            request = heapq.heappop(self._arriving)[2]
            self._waiting.append(request)
        while self._waiting and len(self.running) < self.size.slots:
            request = self._waiting.popleft()
            left = self._left(request)
            self.running[request.trajectory] = request
            prefill = self._prefill(request, left)
            self.batch.add(request.trajectory, left.left, prefill=prefill)

    def _prefill(self, request: PlacedRequest, left: Left) -> int:
        """Tokens that the engine has not kept of a request."""
        return self._prompt_tokens + round(left.done) if request.kv is None else 0

    def _left(self, request: PlacedRequest) -> Left:
        return self._lefts[request.trajectory]
