"""Unacknowledged records of one append, with a limit."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import Any

from kafka import KafkaProducer
from kafka import errors as kafka_errors

from dora_pipe.bus.kafka.access import REFUSED, cause_of
from dora_pipe.bus.kafka.client import send
from dora_pipe.core.pure.records import Append

IN_FLIGHT_RECORDS_MAX = 4096

IN_FLIGHT_BYTES_MAX = 32 * 1024 * 1024
"""Maximum unacknowledged bytes; one larger record is sent alone."""


class InFlight:
    """Unacknowledged records of one append, oldest first; `limit_s` is the deadline of each.

    Example: ``in_flight.send(record)`` for each, then ``offsets = in_flight.wait()``.
    """

    def __init__(self, producer: KafkaProducer, limit_s: float) -> None:
        self._producer = producer
        self._limit_s = limit_s
        self._sent: deque[tuple[Any, Append, int, float]] = deque()  # future, bytes, deadline
        self._offsets: list[int] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._sent)

    def send(self, record: Append) -> None:
        """Send, waiting for room. Raises the client's errors."""
        size = len(record.key) + len(record.value)  # headers are small, and slow to sum
        if len(self._sent) >= IN_FLIGHT_RECORDS_MAX or self.bytes + size > IN_FLIGHT_BYTES_MAX:
            self.wait()
        deadline_s = time.monotonic() + self._limit_s
        self._sent.append((send(self._producer, record), record, size, deadline_s))
        self.bytes += size

    def wait(self) -> list[int]:
        """Wait for all and return their offsets in order. Raises the client's errors."""
        if self._sent:
            # Do not linger at the end of a call.
            self._producer.flush(_remaining_s(self._sent[0][3]))
        while self._sent:
            self._wait_for_oldest()
        return self._offsets

    def _wait_for_oldest(self) -> None:
        future, _, size, deadline_s = self._sent[0]
        acknowledged = future.get(_remaining_s(deadline_s))
        self._sent.popleft()
        self._offsets.append(int(acknowledged.offset))
        self.bytes -= size

    def failure(self, error: Exception) -> tuple[Exception, Append | None]:
        """Return the cause of an error and the refused record, if any."""
        with suppress(kafka_errors.KafkaError):
            if self._sent:
                self._producer.flush(_remaining_s(self._sent[0][3]))
        failed = [(sent[0], sent[1]) for sent in self._sent if sent[0].failed()]
        causes = [(cause_of(future.exception), record) for future, record in failed]
        first = next((each for each in causes if isinstance(each[0], REFUSED)), None)
        return first or (cause_of(error), None)


def _remaining_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())
