"""Worker's half of a phase.

At full load an append contains one turn's trajectories.
"""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from dora_pipe.bench.dataplane.process import WARM, Done, Inside, Publish
from dora_pipe.bench.dataplane.source import Source, encoded
from dora_pipe.bus.bus import Bus
from dora_pipe.config.model import Bus as Section
from dora_pipe.core.pure.machine import BUS_TURN_NS
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.log_location import LogLocation

APPEND_BYTES_MAX: Final = 8 * 1024 * 1024

_SEED: Final = 30


class Publisher:
    def __init__(self, task: Publish, bus: Bus) -> None:
        self._source = Source(task.run, task.tokens)
        self._topic, self._writer = Topics(task.run).trajectories, bus.writer()
        self._next = 0
        self._held: list[Append] = []
        self._held_bytes = 0
        self.forget()

    def forget(self) -> None:
        """Reset the counts."""
        self.bytes = 0
        self.own_s = 0.0
        self.finished_ns: list[int] = []

    @property
    def full(self) -> bool:
        return self._held_bytes >= APPEND_BYTES_MAX

    def encode(self, finished_ns: int) -> None:
        """Encode the next trajectory."""
        start_s = time.thread_time()
        trajectory = self._source(self._next)
        self.finished_ns.append(finished_ns)
        self.own_s += time.thread_time() - start_s
        record = encoded(trajectory, self._topic)
        self._next += 1
        self._held.append(record)
        self._held_bytes += len(record.value)

    def append(self) -> None:
        held, self._held = self._held, []
        self.bytes += self._held_bytes
        self._held_bytes = 0
        self._writer.append(held)


def publish(task: Publish, inside: Inside) -> Done:
    """Publish for `task.seconds`."""
    section = Section(url=task.address)
    bus = LogLocation(run="", url=task.address, bus=section, blobs=task.blobs).open()
    publisher = Publisher(task, bus)
    for _ in range(WARM):
        publisher.encode(time.monotonic_ns())
        publisher.append()
    publisher.forget()
    start_ns, start_s = inside.ready(), time.process_time()
    if task.per_s:
        _paced(publisher, start_ns, task)
    else:
        _flat_out(publisher, start_ns + round(task.seconds * 1e9))
    done = Done(
        records=len(publisher.finished_ns),
        bytes=publisher.bytes,
        start_ns=start_ns,
        end_ns=time.monotonic_ns(),
        cpu_s=time.process_time() - start_s - publisher.own_s,
        moments=publisher.finished_ns,
    )
    bus.close()
    return done


def _flat_out(publisher: Publisher, until_ns: int) -> None:
    while time.monotonic_ns() < until_ns:
        turn_ns = time.monotonic_ns() + BUS_TURN_NS
        while not publisher.full and (now_ns := time.monotonic_ns()) < turn_ns:
            publisher.encode(now_ns)
        publisher.append()


def _paced(publisher: Publisher, start_ns: int, task: Publish) -> None:
    """Publish at random times; waiting counts as latency."""
    for_ns = iter(finish_moments(task.per_s, task.seconds))
    due_ns = next(for_ns, None)
    while due_ns is not None:
        wait_ns = start_ns + due_ns - time.monotonic_ns()
        if wait_ns > 0:
            time.sleep(wait_ns / 1e9)
        while due_ns is not None and not publisher.full:
            if start_ns + due_ns > time.monotonic_ns():
                break
            publisher.encode(start_ns + due_ns)
            due_ns = next(for_ns, None)
        publisher.append()


def finish_moments(per_s: float, seconds: float) -> list[int]:
    """Return finish times in ns with exponential gaps (fixed seed).

    Example: ``len(finish_moments(100.0, 2.0))`` is about 200.
    """
    count = max(1, round(per_s * seconds))
    gaps = np.random.default_rng(_SEED).exponential(1e9 / per_s, count)
    return [int(moment) for moment in gaps.cumsum()]
