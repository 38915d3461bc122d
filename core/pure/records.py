"""Records of the log and their positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.dead_letter import DeadLetter


class TopicPartition(NamedTuple):
    """Partition of a topic, e.g. ``TopicPartition("demo.control", 0)``."""

    topic: str
    partition: int


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """Record to append. Headers are ASCII; keys may be empty."""

    topic: str
    value: bytes
    partition: int = 0
    key: bytes = b""
    headers: tuple[tuple[str, bytes], ...] = ()
    digest: str = ""
    """Digest of the value if already computed (`wire.value_digest`); not stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Record as returned by a reader."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = field(default=())
    checked: str = field(default="", compare=False)
    """Verified digest of the value; empty if unverified. Clear it when changing the value."""

    @property
    def at(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


def stored(record: Append, offset: int) -> Record:
    """Return an appended record as read."""
    return Record(
        topic=record.topic,
        partition=record.partition,
        offset=offset,
        key=record.key,
        value=record.value,
        headers=record.headers,
    )


def dead_letter_of(record: Record, error: SchemaError, at_ns: int) -> DeadLetter:
    """Return the dead letter of an unreadable record."""
    return DeadLetter(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        reason=error.message,
        path=error.path,
        at_ns=at_ns,
        key=record.key,
        value=record.value,
        headers=record.headers,
    )
