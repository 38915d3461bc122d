"""How long a role's own thread bears with a log that is away: as long as the loop does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from dora_pipe.clock import Clock
from dora_pipe.errors import BusError
from dora_pipe.runtime import DELIVERY_TIMEOUT_S, FINAL_ERRORS, RETRY_PAUSE_S

T = TypeVar("T")

LOG = logging.getLogger(__name__)


def patiently(what: str, call: Callable[[], T], clock: Clock) -> T:
    """`call`, again and again while the log is away. Raises its BusError in the end.

    For calls that may be repeated: opening a reader, reading, asking for an end.
    """
    give_up_ns = clock.now_ns() + int(DELIVERY_TIMEOUT_S * 1e9)
    said = ""
    while True:
        try:
            return call()
        except FINAL_ERRORS:
            raise
        except BusError as error:
            if clock.now_ns() >= give_up_ns:
                raise
            if error.message != said:
                LOG.warning("%s: %s; trying again", what, error.message)
            said = error.message
            clock.sleep(RETRY_PAUSE_S)
