"""What the processes of the bench are told, and what they answer; decides nothing.

A task is one JSON argument. The process opens and warms whatever it needs, says `READY` on stdout,
waits for a line on stdin, works, and prints its `Done` as one line of JSON. One that reads is told
on a second line how many records there are in all, once that is known.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

READY: Final = b"ready\n"
GO: Final = b"go\n"

WARM: Final = 16
"""Trajectories that are published and fetched before the clock starts."""

GROUP_SIZE: Final = 8
PARTITIONS: Final = 4
"""Of the trajectories topic; the configuration's default."""

Side = Literal["raw", "bus"]


class Layer(msgspec.Struct, frozen=True, kw_only=True, tag="layer"):
    """Append records that were encoded before, or read them; nobody looks into them."""

    side: Side
    does: Literal["append", "read"]
    servers: str
    topic: str
    tokens: int
    seconds: float
    """Of appending."""
    per_s: float = 0.0
    """One record a call, so many a second at even gaps; 0: many a call, as fast as it goes."""


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag="publish"):
    """Encode trajectories and append them."""

    address: str
    run: str
    tokens: int
    seconds: float
    per_s: float = 0.0
    """They finish at random moments, so many a second; 0: the next one when the last is encoded."""


class Assemble(msgspec.Struct, frozen=True, kw_only=True, tag="assemble"):
    """Read, check and decode batches of trajectories as the trainer does."""

    address: str
    run: str
    batch: int
    """Trajectories; 0: whatever has come."""


Task = Layer | Publish | Assemble


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a process did between its start and its end (ns of the machine's monotonic clock)."""

    records: int
    bytes: int
    """Of their values."""
    start_ns: int
    end_ns: int
    cpu_s: float
    stages: dict[str, float] = {}
    """CPU seconds by stage; `own` is what only the bench does, and counts nowhere."""
    moments: dict[str, list[int]] = {}
    """For each trajectory behind the warm ones, in order: when it had come so far (ns)."""


TASK: Final = msgspec.json.Decoder(Task)
DONE: Final = msgspec.json.Decoder(Done)
