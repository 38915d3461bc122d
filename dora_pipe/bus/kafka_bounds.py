"""What is under way between a client and its cluster; decides how much that may be.

kafka-python takes whatever it is given: its producer copies every record into memory and never says
no. So a writer waits here until all has landed whenever more would be under way than the bounds
allow, and a reader keeps here what was fetched over its caller's bounds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from kafka import KafkaProducer

from dora_pipe.bus.checks import record_bytes
from dora_pipe.bus.kafka_client import send
from dora_pipe.bus.port import Append, Record, TopicPartition

FLIGHT_RECORDS_MAX = 4096
FLIGHT_BYTES_MAX = 32 * 1024 * 1024
"""Records of one append that are sent and not acknowledged; one larger record may fly alone."""


class Flight:
    """The records of one append on their way, oldest first; `limit_s` for each of them.

    Example: ``flight.send(record)`` for each, then ``offsets = flight.land()``.
    """

    def __init__(self, producer: KafkaProducer, limit_s: float) -> None:
        self._producer = producer
        self._limit_s = limit_s
        self._flying: deque[tuple[Any, int, float]] = deque()  # future, bytes, deadline
        self._offsets: list[int] = []
        self.bytes = 0
        """On their way."""

    def __len__(self) -> int:
        return len(self._flying)

    def send(self, record: Append) -> None:
        """Hand it to the producer, as soon as there is room. Raises the client's errors."""
        size = len(record.key) + len(record.value)  # headers are small, and slow to add up
        if len(self._flying) >= FLIGHT_RECORDS_MAX or self.bytes + size > FLIGHT_BYTES_MAX:
            self.land()
        deadline_s = time.monotonic() + self._limit_s
        self._flying.append((send(self._producer, record), size, deadline_s))
        self.bytes += size

    def land(self) -> list[int]:
        """Wait for all; every offset since the start, in order. Raises the client's errors."""
        if self._flying:
            # The producer lingers, so that a call makes a few large batches and not many small
            # ones; now there is nothing more to wait for. A driven one moves only here.
            self._producer.flush(_left(self._flying[0][2]))
        while self._flying:
            self._land_one()
        return self._offsets

    def _land_one(self) -> None:
        future, size, deadline_s = self._flying.popleft()
        # Asking is cheaper than waiting: most land with the batch of the one before them.
        landed = future.value if future.succeeded() else future.get(_left(deadline_s))
        self._offsets.append(int(landed.offset))
        self.bytes -= size


class Fetched:
    """Records that came over the bounds of one poll, kept for the next, in order."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], deque[Record]] = {}
        """By partition, none empty."""

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, came: Sequence[Record], *, records_max: int, bytes_max: int) -> list[Record]:
        """What the bounds allow of those kept and those that came behind them; at least one."""
        for one in came:
            at = one.topic, one.partition
            if at not in self._kept:
                self._kept[at] = deque()
            self._kept[at].append(one)
        found: list[Record] = []
        for at in list(self._kept):
            waiting = self._kept[at]
            while waiting and len(found) < records_max:
                bytes_max -= record_bytes(waiting[0])
                if found and bytes_max < 0:
                    return found
                found.append(waiting.popleft())
            if waiting:
                break
            del self._kept[at]
        return found

    def first(self, tp: TopicPartition) -> int | None:
        """The offset of the first record kept of a partition."""
        waiting = self._kept.get(tp)
        return waiting[0].offset if waiting else None

    def forget(self, tp: TopicPartition) -> None:
        """Drop those of a partition."""
        self._kept.pop(tp, None)


def _left(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
