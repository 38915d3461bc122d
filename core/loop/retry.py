"""Retries while a log is unreachable or full, or a store is full."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from dora_pipe.core.errors import (
    AccessRefused,
    BusError,
    Fenced,
    LogTruncated,
    NoRoom,
    OutcomeUnknown,
    RecordRefused,
    TopicMissing,
)
from dora_pipe.core.system.clock import Clock

T = TypeVar("T")

LOG = logging.getLogger(__name__)

DELIVERY_TIMEOUT_S: Final = 120.0
"""Maximum time of retries."""

RETRY_PAUSE_S: Final = 0.25

ROOM_PAUSE_S: Final = 1.0
"""Pause between retries, which may write a full policy."""

FINAL_ERRORS: Final = (AccessRefused, Fenced, LogTruncated, RecordRefused, TopicMissing)
"""Errors that a retry cannot fix."""


def retry_bus(what: str, call: Callable[[], T], clock: Clock, *, exclusive: bool = False) -> T:
    """Retry a call while the bus is unreachable or full. Raises the last BusError.

    Repeated appends of plain writers are harmless: readers drop duplicates. An `exclusive` writer
    must not retry an unknown outcome.
    """
    give_up_ns = clock.now_ns() + int(DELIVERY_TIMEOUT_S * 1e9)
    reported = ""
    while True:
        try:
            return call()
        except FINAL_ERRORS:
            raise
        except BusError as error:
            unknown = exclusive and isinstance(error, OutcomeUnknown)
            error.waited_out = clock.now_ns() >= give_up_ns
            if unknown or error.waited_out:
                raise
            if error.message != reported:
                LOG.warning("%s: %s; trying again", what, error.message)
            reported = error.message
            clock.sleep(RETRY_PAUSE_S)


def until_there_is_room(
    what: str, call: Callable[[], T], clock: Clock, tell: Callable[[str], None]
) -> Generator[None, None, T]:
    """Retry a call without side effects while there is no room, yielding before each pause.
    Raises NoRoom.

    `tell` gets the reason to wait, and an empty text afterwards.
    """
    give_up_ns = clock.now_ns() + int(DELIVERY_TIMEOUT_S * 1e9)
    waited = False
    while True:
        try:
            done = call()
        except NoRoom as error:
            if clock.now_ns() >= give_up_ns:
                lasted = f"{error.message}, with no success for {DELIVERY_TIMEOUT_S:g} s"
                over = NoRoom(lasted, hint=error.hint)
                over.waited_out = True
                raise over from error
            if not waited:
                LOG.warning(
                    "%s: %s; trying again for %g s", what, error.message, DELIVERY_TIMEOUT_S
                )
            waited = True
            tell(error.message)
            yield
            clock.sleep(ROOM_PAUSE_S)
        else:
            if waited:
                LOG.warning("%s: space is available again", what)
            tell("")
            return done
