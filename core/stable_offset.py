"""Waits until readers may see all that was acknowledged; it decides nothing.

A role that dies inside an exclusive append leaves it open, and readers stop before it, although
records behind it were acknowledged: commits, facts, rounds. Who reads to the end of the log in
order to decide would decide on half of what happened. It waits here first, until the log has ended
that append: at once when the dead role's successor opens its writer, else when the broker's own
limit is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from dora_pipe.bus.port import HELD_LIMIT_S, Bus, TopicPartition
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError
from dora_pipe.core.retry import retry_bus

LOG = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""Between two looks at an append that is open."""


def await_stable_offset(bus: Bus, partitions: Sequence[TopicPartition], clock: Clock) -> None:
    """Return when everything that was acknowledged before this call may be read.

    Call it behind taking an exclusive writer, and read to `Bus.end` afterwards. Raises BusError,
    also when readers are still held back after `HELD_LIMIT_S`.
    """
    ends = {at: _patient(bus.written_end, at, clock) for at in partitions}
    give_up_ns = clock.now_ns() + int(HELD_LIMIT_S * 1e9)
    said = False
    while held := [at for at, end in ends.items() if _patient(bus.end, at, clock) < end]:
        topics = ", ".join(sorted({at.topic for at in held}))
        if clock.now_ns() >= give_up_ns:
            raise BusError(
                f"{topics}: acknowledged records cannot be read, because an append before them "
                f"is open for {HELD_LIMIT_S:.0f} s and nobody ends it",
                hint="kafka-transactions.sh --bootstrap-server HOST:PORT list says whose "
                "transaction is open; its abort ends it",
            )
        if not said:
            LOG.warning(
                "waiting for the log to end an append that a dead role left open in %s (at most "
                "%.0f s)",
                topics,
                HELD_LIMIT_S,
            )
            said = True
        clock.sleep(LOOK_S)
    if said:
        LOG.info("everything can be read again")


def _patient(ask: Callable[[TopicPartition], int], at: TopicPartition, clock: Clock) -> int:
    return retry_bus("reading the log's end", lambda: ask(at), clock)
