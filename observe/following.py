"""Follow the log of a run: wait while it cannot be read, and remember what was sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError, LogTruncated

TURN_S: Final = 1.0
"""Time between two looks at a log that was read to its end."""

RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 10.0
"""Time between two tries while the log cannot be read; it doubles with each."""


class Checkpoint:
    """A file that remembers how far something was sent; without a path, nothing does."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def read(self) -> Any:
        """The value that was written last; None where there is none."""
        if self.path is None:
            return None
        with suppress(OSError, ValueError):
            return json.loads(self.path.read_text())
        return None

    def write(self, value: Any) -> None:
        """Remember, all or nothing. A full disk costs a row sent twice, no more."""
        if self.path is not None:
            unfinished = self.path.with_name(f"{self.path.name}.tmp")
            with suppress(OSError):
                unfinished.parent.mkdir(parents=True, exist_ok=True)
                unfinished.write_text(f"{json.dumps(value)}\n")
                unfinished.replace(self.path)


class LogReading(Protocol):
    """An open log."""

    def close(self) -> None:
        """Release the readers."""
        ...


T = TypeVar("T", bound=LogReading)


def follow_log(
    opened: Callable[[], T],
    turn: Callable[[T], bool],
    *,
    clock: Clock,
    away: Callable[[BusError], bool],
) -> None:
    """Call `turn` once a second until it returns True; open the log again after an error.

    Args:
        turn: Reads the log to its present end; True ends the following.
        away: Called for every error of the log; True ends the following.

    Raises:
        LogTruncated: The log has lost records that were not read.
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
