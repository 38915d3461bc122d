"""Position of the last audit, to detect a log that was truncated or rewritten.

The file may be deleted; only an audit without violations writes it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.audit.reading import record_at
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import TopicMissing
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex

FILE_NAME: Final = "audit.json"

Seen = tuple[int, str]
"""Offset and sha256 of a record."""


class LastLook(msgspec.Struct, frozen=True, kw_only=True):
    """Log position without violations."""

    run: str
    mark: str
    """Id of the log file; a copy has another."""
    control: Seen
    decisions: Seen
    """Last round; its chain covers everything before."""
    trajectories: dict[int, Seen]
    """By partition."""


def read_last_look(path: Path) -> LastLook | None:
    """Read the file; None if missing or invalid."""
    with suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=LastLook)
    return None


def write_last_look(path: Path, look: LastLook) -> None:
    with suppress(OSError):
        path.write_bytes(msgspec.json.encode(look))


def changed_since(look: LastLook, bus: Bus, topics: Topics, mark: str) -> str:
    """Return what is missing or changed, or "". Raises BusError."""
    if (look.run, look.mark) != (topics.run, mark):
        return ""
    control, decisions = TopicPartition(topics.control, 0), TopicPartition(topics.decisions, 0)
    places = {control: look.control, decisions: look.decisions}
    for partition, last_record in look.trajectories.items():
        places[TopicPartition(topics.trajectories, partition)] = last_record
    try:
        ends = {tp: bus.end(tp) for tp in places}
    except TopicMissing:
        return ""
    there = {tp: offset for tp, (offset, _) in places.items() if offset < ends[tp]}
    records = {tp: record_at(bus, tp, offset) for tp, offset in there.items()}

    def is_there(tp: TopicPartition) -> bool:
        record = records.get(tp)
        return record is not None and sha256_hex(record.value) == places[tp][1]

    if not is_there(control):
        return ""
    for tp, (offset, _) in places.items():
        name = f"{tp.topic.removeprefix(f'{topics.run}.')}:{tp.partition}"
        if tp not in there:
            return f"{name} ends at {ends[tp]} and held offset {offset} when audit last looked"
        if not is_there(tp):
            return f"{name} has another record at offset {offset} than audit has seen there"
    return ""
