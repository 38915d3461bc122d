"""Decides how long a role bears with a log that is away or full, or a store without room, and which
errors no wait mends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from typing import Final, TypeVar

from dora_pipe.core.clock import Clock
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

T = TypeVar("T")

LOG = logging.getLogger(__name__)

DELIVERY_TIMEOUT_S: Final = 120.0
"""Appending and polling are tried again for so long while the bus is away or full."""

RETRY_PAUSE_S: Final = 0.25

ROOM_PAUSE_S: Final = 1.0
"""Between two tries where there was no room: each may write all of a policy."""

FINAL_ERRORS: Final = (AccessRefused, Fenced, LogTruncated, RecordRefused, TopicMissing)
"""Trying again cannot mend these."""


def retry_bus(what: str, call: Callable[[], T], clock: Clock, *, exclusive: bool = False) -> T:
    """`call`, again and again while the bus is away or full. Raises its BusError in the end.

    For calls that may be repeated: opening, reading, asking for an end, and the appends of a plain
    writer: identity makes a second one harmless. An `exclusive` writer must not append again after
    an unknown outcome: that ends at once, and its role starts again under a new role epoch.
    """
    give_up_ns = clock.now_ns() + int(DELIVERY_TIMEOUT_S * 1e9)
    said = ""
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
            if error.message != said:
                LOG.warning("%s: %s; trying again", what, error.message)
            said = error.message
            clock.sleep(RETRY_PAUSE_S)


def until_there_is_room(
    what: str, call: Callable[[], T], clock: Clock, tell: Callable[[str], None]
) -> Generator[None, None, T]:
    """`call`, again and again while it finds no room; yields before each pause, so that whoever
    drives it can end. Raises NoRoom in the end. `call` leaves nothing behind where it fails.

    `tell` hears why it waits, and an empty text when it does no more.
    """
    give_up_ns = clock.now_ns() + int(DELIVERY_TIMEOUT_S * 1e9)
    waited = False
    while True:
        try:
            done = call()
        except NoRoom as error:
            if clock.now_ns() >= give_up_ns:
                lasted = f"{error.message}, and there was none for {DELIVERY_TIMEOUT_S:g} s"
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
                LOG.warning("%s: there is room again", what)
            tell("")
            return done
