"""Decides nothing: published closed forms, and simulations that meet their assumptions.

Two sources. ROLL Flash bounds the time of a step from above, for workers that each run one sample
at a time; a simulation may never take longer than its bound, and never win more than the greatest
speed-up. Applied Compute predicts the mean staleness of a stream of groups that a trainer consumes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from dora_pipe.bench.paper.lengths import Lengths, figures_of

# ROLL Flash: K workers, Q samples in flight, N samples per step, mean generation time mu,
# longest L.


def completion_bound(*, workers: int, in_flight: int, mean: float, longest: float) -> float:
    """Mean time per completed sample, at most: mu / K + L / Q."""
    return mean / workers + longest / in_flight


def sync_bound(*, workers: int, samples: int, mean: float, longest: float) -> float:
    """Time of a synchronous rollout of N samples, at most (Q = N)."""
    return samples * completion_bound(
        workers=workers, in_flight=samples, mean=mean, longest=longest
    )


def speedup_bound(*, mean: float, longest: float) -> float:
    """No asynchrony makes generation faster than by (L + mu) / mu, reached at K = N."""
    return (longest + mean) / mean


def generate(times: Sequence[float], workers: int) -> float:
    """When the last sample ends if each goes to the worker that is free first."""
    free = [0.0] * workers
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    return max(free)


# Applied Compute: C samples in flight, batches of B, a queue of q batches, rho = v_rollout /
# v_train, M_tail = E[longest of a group] / E[length].


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A published row: what was predicted and what was measured."""

    in_flight: int
    batch: int
    queue: int
    rho: float
    tail: float
    published: float
    measured: float

    @property
    def closed_form(self) -> float:
        """Mean staleness by the formula as printed."""
        if self.rho < 1:
            return self.in_flight * self.tail / self.batch + self.rho
        waiting = (2 * self.queue + self.rho - 1) / (2 * self.rho)
        return self.in_flight * self.tail / (self.rho * self.batch) + waiting


STREAMS: Final = (
    Stream(in_flight=120, batch=240, queue=2, rho=0.63, tail=1.42, published=1.34, measured=1.26),
    Stream(in_flight=240, batch=120, queue=2, rho=0.92, tail=1.43, published=3.86, measured=3.59),
    Stream(in_flight=128, batch=128, queue=2, rho=1.07, tail=1.44, published=3.29, measured=3.09),
    Stream(in_flight=240, batch=120, queue=1, rho=0.86, tail=1.42, published=3.34, measured=3.40),
    Stream(in_flight=120, batch=120, queue=1, rho=0.67, tail=1.42, published=1.95, measured=1.92),
    Stream(in_flight=128, batch=128, queue=1, rho=1.14, tail=1.45, published=2.24, measured=2.01),
)
STREAM_GROUP: Final = 8
"""Siblings of a group there; not published, M_tail is what matters."""
STREAM_STEPS: Final = 400
STREAM_WARM: Final = 50


@cache
def lengths_with_tail(tail: float, size: int) -> Lengths:
    """Uncorrelated log-normal lengths whose longest of `size` is `tail` times the mean."""
    low, high = 0.0, 3.0
    for _ in range(30):
        sigma = (low + high) / 2
        lengths = Lengths(mu=8.0, sigma=sigma, cap=10**9, rho=0.0)
        if figures_of(lengths, size=size, groups=2000).tail < tail:
            low = sigma
        else:
            high = sigma
    return Lengths(mu=8.0, sigma=(low + high) / 2, cap=10**9, rho=0.0)


def simulate_stream(row: Stream, *, seed: int) -> float:
    """Mean staleness over the samples that are trained.

    `in_flight` samples are generated at a time; a slot that is free takes the next sample of the
    newest group. A group that is complete goes into the queue, and a full queue loses its oldest.
    The trainer takes the oldest batch as soon as there is one. Staleness is counted from the
    version that a group began with to the one that its batch is trained on.
    """
    return _Stream(row, seed).run()


class _Stream:
    """One run of `simulate_stream`; a sample takes 1 on the mean."""

    def __init__(self, row: Stream, seed: int) -> None:
        self.row, self.seed = row, seed
        self.train_s = row.rho * row.batch / row.in_flight
        self.lengths = lengths_with_tail(row.tail, STREAM_GROUP)
        self.mean = figures_of(self.lengths, size=STREAM_GROUP, groups=2000).mean
        self.ordinal = self.version = self.steps = 0
        self.slots: list[tuple[float, int]] = []
        self.waiting: deque[tuple[float, int]] = deque()
        """Samples of the newest group that have no slot yet: their time, their group."""
        self.open: dict[int, int] = {}
        self.began: dict[int, int] = {}
        self.queue: deque[int] = deque()
        self.training_s = math.inf
        self.stale: list[float] = []

    def run(self) -> float:
        """Event by event."""
        for _ in range(self.row.in_flight // STREAM_GROUP * STREAM_GROUP):
            self._fill_slot(0.0)
        while self.steps < STREAM_STEPS:
            if self.training_s <= self.slots[0][0]:
                self.version += 1
                now, self.training_s = self.training_s, math.inf
            else:
                now, ordinal = heapq.heappop(self.slots)
                self._ended(ordinal)
                self._fill_slot(now)
            self._take(now)
        return sum(self.stale) / len(self.stale)

    def _ended(self, ordinal: int) -> None:
        self.open[ordinal] -= 1
        if self.open[ordinal]:
            return
        del self.open[ordinal]
        self.queue.extend([ordinal] * STREAM_GROUP)
        while len(self.queue) > self.row.queue * self.row.batch:
            self.queue.popleft()

    def _fill_slot(self, now: float) -> None:
        if not self.waiting:
            drawn = self.lengths.draw(seed=self.seed, ordinal=self.ordinal, size=STREAM_GROUP)
            self.began[self.ordinal], self.open[self.ordinal] = self.version, STREAM_GROUP
            self.waiting.extend((length / self.mean, self.ordinal) for length in drawn)
            self.ordinal += 1
        length, ordinal = self.waiting.popleft()
        heapq.heappush(self.slots, (now + length, ordinal))

    def _take(self, now: float) -> None:
        if self.training_s < math.inf or len(self.queue) < self.row.batch:
            return
        batch = [self.queue.popleft() for _ in range(self.row.batch)]
        if self.steps >= STREAM_WARM:
            found = sum(self.version - self.began[ordinal] for ordinal in batch) / len(batch)
            self.stale.append(found)
        self.steps += 1
        self.training_s = now + self.train_s
