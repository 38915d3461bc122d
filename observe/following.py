"""Follow the log of a run through outages, and persist a position."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from dora_pipe.core.errors import BusError, LogTruncated
from dora_pipe.core.system.clock import Clock
from dora_pipe.core.system.durable import write_atomically

TURN_S: Final = 1.0
RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 10.0
"""Doubles with each attempt."""


class Checkpoint:
    """File that stores a position; does nothing without a path."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def read(self) -> Any:
        if self.path is None:
            return None
        with suppress(OSError, ValueError):
            return json.loads(self.path.read_text())
        return None

    def write(self, value: Any) -> None:
        """Write atomically. A full disk is not an error: rows may be sent twice."""
        if self.path is not None:
            with suppress(OSError):
                write_atomically(self.path, f"{json.dumps(value)}\n".encode())


class LogReading(Protocol):
    def close(self) -> None: ...


T = TypeVar("T", bound=LogReading)


def follow_log(
    opened: Callable[[], T],
    turn: Callable[[T], bool],
    *,
    clock: Clock,
    away: Callable[[BusError], bool],
) -> None:
    """Call `turn` once a second until it returns True; reopen the log after an error.

    Args:
        turn: Reads the log to its present end; True stops.
        away: Called for every error of the log; True stops.

    Raises:
        LogTruncated: The log has lost unread records.
    """
    retry_s = RETRY_FIRST_S
    while True:
        try:
            with closing(opened()) as reading:
                while not turn(reading):
                    retry_s = RETRY_FIRST_S
                    clock.sleep(TURN_S)
                return
        except LogTruncated:
            raise
        except BusError as error:
            if away(error):
                return
            clock.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)
