"""Decides nothing: a worker that obeys decisions as production's does, on modelled hardware.

Requests wait in it until a slot is free, run in a `Sharing`, and come back as what control would
say of them. A request that leaves before its end takes along what it has left; it goes on elsewhere
after its KV cache has been moved or its prefix prefilled.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass

from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.rounds import Assign, PlacedRequest
from dora_pipe.sim.modelled import NEVER_S, EngineRates, Sharing


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
        place_s: float = 0.0,
        react_s: float = 0.0,
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
        self._place_s = place_s
        self._react_s = react_s
        self._waiting: deque[PlacedRequest] = deque()
        self._arriving: list[tuple[float, str, PlacedRequest]] = []

    def assign(self, decision: Assign, now_s: float) -> None:
        """Load another version."""
        assert not self.running and not self._waiting, f"{self.size.name} has open requests"
        self.assigned = decision
        self.ready_s = now_s + self.batch.rates.load_s + self._react_s
        self.loads += 1

    def ready(self, now_s: float) -> Assign | None:
        """The assignment that has been loaded by now, once."""
        if self.assigned is None or self.ready_s > now_s + 1e-9:
            return None
        found, self.assigned, self.ready_s = self.assigned, None, NEVER_S
        return found

    def place(self, request: PlacedRequest, now_s: float) -> None:
        """A request waits for a slot; one that was moved here first waits for its KV cache."""
        delay_s = self._place_s
        if request.kv is not None:
            delay_s += self.batch.rates.move_s(round(self._left(request).done))
        if not delay_s:
            self._waiting.append(request)
        else:
            arrives_s = now_s + delay_s
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
            found += [self.running.pop(name) for name in self.batch.advance(until_s)]
            self._fill(until_s)
            if until_s >= now_s:
                return found

    def _fill(self, now_s: float) -> None:
        while self._arriving and self._arriving[0][0] <= now_s + 1e-9:
            self._waiting.append(heapq.heappop(self._arriving)[2])
        while self._waiting and len(self.running) < self.size.slots:
            request = self._waiting.popleft()
            left = self._left(request)
            again = round(left.done) if request.kv is None else 0
            prefill = self._prompt_tokens + again if request.kv is None else 0
            self.running[request.trajectory] = request
            self.batch.add(request.trajectory, left.left, prefill=prefill)

    def _left(self, request: PlacedRequest) -> Left:
        return self._lefts[request.trajectory]
