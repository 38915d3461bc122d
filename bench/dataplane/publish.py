"""The worker's half of the bench: encode and append, as fast as it goes or as they finish.

At full load it gathers as a worker does: one durable append for everything that was encoded within
one turn of the loop. Below, a trajectory is appended at once, with whatever finished while the
append before it was under way. It decides nothing else.
"""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from dora_pipe.bench.dataplane.carriers import Outbox
from dora_pipe.bench.dataplane.peers import open_outbox
from dora_pipe.bench.dataplane.process import WARM, Done, Inside, Publish
from dora_pipe.bench.dataplane.source import Source
from dora_pipe.core.runtime import BUS_TURN_NS

APPEND_BYTES_MAX: Final = 8 * 1024 * 1024
"""One append is no larger, so that a queue of a few MB and a log meet the same calls."""

_SEED: Final = 30


class Publisher:
    """Appends trajectories of one run and counts what each took."""

    def __init__(self, task: Publish, outbox: Outbox) -> None:
        self._source = Source(task.run, task.tokens, routes=task.routes)
        self._outbox = outbox
        self._next = 0
        self._held: list[Any] = []
        self._held_bytes = 0
        self.forget()

    def forget(self) -> None:
        """Begin to count again; numbers go on."""
        self.bytes = 0
        self.encode_s = 0.0
        self.own_s = 0.0
        self.finished_ns: list[int] = []
        self.begun_ns: list[int] = []
        """When its encoding began."""
        self.appended_ns: list[int] = []
        """When the append that carries a trajectory began ..."""
        self.acked_ns: list[int] = []
        """... and when it ended."""

    @property
    def full(self) -> bool:
        """Whether one append holds no more."""
        return self._held_bytes >= APPEND_BYTES_MAX

    def encode(self, finished_ns: int) -> None:
        """Take the next trajectory, which finished at that moment."""
        start_s = time.thread_time()
        trajectory = self._source(self._next)
        self.finished_ns.append(finished_ns)
        self.begun_ns.append(time.monotonic_ns())
        made_s = time.thread_time()
        held, size = self._outbox.encode(trajectory)
        self.encode_s += time.thread_time() - made_s
        self.own_s += made_s - start_s
        self._next += 1
        self._held.append(held)
        self._held_bytes += size

    def append(self) -> None:
        """Make durable what was encoded."""
        held, self._held = self._held, []
        self.bytes += self._held_bytes
        self._held_bytes = 0
        self.appended_ns += [time.monotonic_ns()] * len(held)
        self._outbox.put(held)
        self.acked_ns += [time.monotonic_ns()] * len(held)


def publish(task: Publish, inside: Inside) -> Done:
    """Publish for `task.seconds`, after the warm ones."""
    outbox = open_outbox(task.address, task.run, paced=bool(task.per_s), claims=task.claims)
    publisher = Publisher(task, outbox)
    for _ in range(WARM):
        publisher.encode(time.monotonic_ns())
        publisher.append()
    outbox.finish()
    publisher.forget()
    watch = inside.ready()
    if task.per_s:
        _paced(publisher, watch.start_ns, task)
    else:
        _flat_out(publisher, watch.start_ns + round(task.seconds * 1e9))
    outbox.finish()
    done = watch.stop(records=len(publisher.finished_ns), value_bytes=publisher.bytes)
    outbox.close()
    return replace(
        done,
        cpu_s=done.cpu_s - publisher.own_s,
        stages={"encode": publisher.encode_s},
        moments={
            "finished": publisher.finished_ns,
            "begun": publisher.begun_ns,
            "appended": publisher.appended_ns,
            "acked": publisher.acked_ns,
        },
    )


def _flat_out(publisher: Publisher, until_ns: int) -> None:
    """One trajectory after the other, an append per turn."""
    while time.monotonic_ns() < until_ns:
        turn_ns = time.monotonic_ns() + BUS_TURN_NS
        while not publisher.full and (now_ns := time.monotonic_ns()) < turn_ns:
            publisher.encode(now_ns)
        publisher.append()


def _paced(publisher: Publisher, start_ns: int, task: Publish) -> None:
    """Trajectories that finish at random moments; one that has to wait counts from its moment."""
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
    """Moments within `seconds` with random gaps (exponential, fixed seed) of mean 1 / `per_s`; ns.

    Example: ``len(finish_moments(100.0, 2.0))`` is about 200.
    """
    count = max(1, round(per_s * seconds))
    gaps = np.random.default_rng(_SEED).exponential(1e9 / per_s, count)
    return [int(moment) for moment in gaps.cumsum()]
