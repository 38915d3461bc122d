"""The assembling half of a peer: batches out of its inbox, each trajectory opened and checked.

Decides nothing.
"""

from __future__ import annotations

import time
from typing import Any, Final

from msgspec.structs import replace

from dora_pipe.bench.dataplane.carriers import Inbox
from dora_pipe.bench.dataplane.peers import open_inbox
from dora_pipe.bench.dataplane.process import WARM, Assemble, Done, Inside
from dora_pipe.bench.dataplane.source import number_of
from dora_pipe.core.errors import BusError

TAKE_S: Final = 0.05
TAKE_MAX: Final = 500
SILENT_S: Final = 30.0
"""Without a trajectory for so long, something is broken."""


class Consumer:
    """Takes batches of `batch` trajectories out of an inbox; 0: whatever has come."""

    def __init__(self, inbox: Inbox, batch: int) -> None:
        self._inbox = inbox
        self._batch = batch
        self._held: list[Any] = []
        self._heard_s = time.monotonic()
        self.forget()

    def forget(self) -> None:
        """Begin to count again."""
        self.records = self.bytes = 0
        self.decode_s = 0.0
        self.polled_ns: dict[int, int] = {}
        self.batched_ns: dict[int, int] = {}

    def read(self, left: int | None) -> None:
        """Take what has come, of so many that are left if that is known, and make batches of it."""
        room = (self._batch or 1) - len(self._held)
        at_most = room if left is None else min(room, left - len(self._held))
        found = self._inbox.take(timeout_s=TAKE_S, at_most=max(1, at_most))
        now_s = time.monotonic()
        if found:
            self._heard_s, self._polled_ns = now_s, time.monotonic_ns()
            self._held += found
        elif now_s - self._heard_s > SILENT_S:
            raise BusError(f"no trajectory came for {SILENT_S:.0f} s")
        while self._held and (len(self._held) >= self._batch or len(self._held) == left):
            self._open()

    def _open(self) -> None:
        size = self._batch or len(self._held)
        taken, self._held[:size] = self._held[:size], []
        start_s = time.thread_time()
        opened = [self._inbox.open(one) for one in taken]
        now_ns = time.monotonic_ns()
        self.decode_s += time.thread_time() - start_s
        for who, size in opened:
            self.polled_ns[number_of(who)] = self._polled_ns
            self.batched_ns[number_of(who)] = now_ns
            self.bytes += size
        self.records += len(opened)


def consume(task: Assemble, inside: Inside) -> Done:
    """Take until the total that comes later, after the warm ones."""
    inbox = open_inbox(task.address, task.run, routes=task.routes)
    consumer = Consumer(inbox, task.batch)
    while consumer.records < WARM:
        consumer.read(WARM - consumer.records)
    consumer.forget()
    watch = inside.ready()
    with inside.listening():
        while inside.total is None or consumer.records < inside.total:
            consumer.read(None if inside.total is None else inside.total - consumer.records)
    done = watch.stop(
        records=consumer.records,
        value_bytes=consumer.bytes,
        end_ns=max(consumer.batched_ns.values(), default=watch.start_ns),
    )
    inbox.close()
    return replace(
        done,
        stages={"decode": consumer.decode_s, "assembly": 0.0},
        moments={
            "polled": [moment for _, moment in sorted(consumer.polled_ns.items())],
            "batched": [moment for _, moment in sorted(consumer.batched_ns.items())],
        },
    )
