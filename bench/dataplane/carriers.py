"""What carries trajectories from a publishing process to an assembling one; decides nothing.

Ours is the log with the worker's own records. The others (`peers`) are what somebody might use in
its place; they carry the same columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from dora_pipe.bench.dataplane.source import encoded
from dora_pipe.bus.port import Bus
from dora_pipe.schemas.trajectory import Trajectory


class Outbox(ABC):
    """Where a publishing process puts trajectories."""

    @abstractmethod
    def encode(self, trajectory: Trajectory) -> tuple[Any, int]:
        """What is put, and how many bytes that is."""

    @abstractmethod
    def put(self, held: Sequence[Any]) -> None:
        """Hand over what was encoded."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all is there that was put, as safe as it gets."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class Inbox(ABC):
    """Where an assembling process takes trajectories."""

    @abstractmethod
    def take(self, *, timeout_s: float, at_most: int) -> list[Any]:
        """What has come, or comes within so many seconds; some may give more than `at_most`."""

    @abstractmethod
    def open(self, one: Any) -> tuple[str, int]:
        """The id of a trajectory whose arrays have been made and checked, and its bytes.

        Raises InvariantBroken.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class LogOutbox(Outbox):
    """The log, with the worker's own records."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._bus = bus
        self._writer = bus.writer()
        self._topic = topic

    def encode(self, trajectory: Trajectory) -> tuple[Any, int]:
        record = encoded(trajectory, self._topic)
        return record, len(record.value)

    def put(self, held: Sequence[Any]) -> None:
        self._writer.append(held)

    def finish(self) -> None:
        pass  # An append returns when it is durable.

    def close(self) -> None:
        self._bus.close()
