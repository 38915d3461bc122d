"""Decides how long a role bears with a log that is away or full, and which errors no wait mends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from dora_pipe.clock import Clock
from dora_pipe.errors import (
    AccessRefused,
    BusError,
    Fenced,
    LogTruncated,
    OutcomeUnknown,
    RecordTooLarge,
    TopicMissing,
)

T = TypeVar("T")

LOG = logging.getLogger(__name__)

DELIVERY_TIMEOUT_S: Final = 120.0
"""Appending and polling are tried again for so long while the bus is away or full."""

RETRY_PAUSE_S: Final = 0.25

FINAL_ERRORS: Final = (AccessRefused, Fenced, LogTruncated, RecordTooLarge, TopicMissing)
"""Trying again cannot mend these."""


def patiently(what: str, call: Callable[[], T], clock: Clock, *, exclusive: bool = False) -> T:
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
            if unknown or clock.now_ns() >= give_up_ns:
                raise
            if error.message != said:
                LOG.warning("%s: %s; trying again", what, error.message)
            said = error.message
            clock.sleep(RETRY_PAUSE_S)
