"""Validation shared by all buses: names, positions, headers, sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from dora_pipe.bus.bus import TRIMMED_TOPICS, TopicSpec
from dora_pipe.core.errors import BusError, LogTruncated, RecordTooLarge, TopicMissing
from dora_pipe.core.pure.records import Append, Record, TopicPartition

BATCH_ROOM_BYTES = 1024 * 1024
"""Batch overhead of a Kafka topic's limit."""

FRAME_ROOM_BYTES = 16 * 1024
"""Upper bound of Kafka's framing of a record with headers."""

RECORD_BYTES_LEAST = 64 * 1024
"""Lower bound of `bus.max_record_bytes`."""

PARTITIONS_MAX = 4096
"""Maximum per topic; SQLite packs topic, partition and offset into one integer."""

POSITION_MAX = 1 << 40
FILLER: Final = "filler"
"""Header of a record that only fills an offset; readers skip it."""

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,200}")  # within Kafka's limit, with its suffixes


class Lifetime:
    """Guard against use after `close`."""

    __slots__ = ("_what", "closed")

    def __init__(self, what: str) -> None:
        self._what = what
        self.closed = False

    def check(self) -> None:
        """Raises BusError after `close`."""
        if self.closed:
            raise BusError(f"{self._what} is closed")

    def close(self) -> bool:
        """Return True on the first call."""
        first, self.closed = not self.closed, True
        return first


def check_spec(spec: TopicSpec) -> None:
    """Raises BusError if any bus could not create the topic."""
    if not _NAME.fullmatch(spec.name) or spec.name in {".", ".."}:
        raise BusError(
            f"`{spec.name}` is not a topic name",
            hint="1 to 200 ASCII letters, digits, dots, underscores and dashes",
        )
    if not 1 <= spec.partitions <= PARTITIONS_MAX:
        raise BusError(f"topic {spec.name}: {spec.partitions} partitions, not 1..{PARTITIONS_MAX}")
    if spec.max_record_bytes < 1:
        raise BusError(f"topic {spec.name}: max_record_bytes is {spec.max_record_bytes}")


def check_exists(tp: TopicPartition, topics: Mapping[str, TopicSpec]) -> TopicSpec:
    """Return the topic of a partition. Raises TopicMissing."""
    spec = topics.get(tp.topic)
    if spec is None:
        raise topic_missing(tp.topic)
    if not 0 <= tp.partition < spec.partitions:
        raise TopicMissing(
            f"topic {tp.topic} has no partition {tp.partition}, it has {spec.partitions}"
        )
    return spec


def check_appends(records: Sequence[Append], topics: Mapping[str, TopicSpec]) -> None:
    """Raises TopicMissing, RecordTooLarge, or BusError for a non-ASCII header, if any record is
    invalid."""
    exists: dict[tuple[str, int], TopicSpec] = {}  # many records share few partitions
    for record in records:
        key = (record.topic, record.partition)
        spec = exists.get(key)
        if spec is None:
            spec = exists[key] = check_exists(TopicPartition(*key), topics)
        names, values = _joined_headers(record)
        if not (names.isascii() and values.isascii()):
            pairs = record.headers
            name = next(n for n, value in pairs if not (n.isascii() and value.isascii()))
            raise BusError(f"header {name!a} of a record for {record.topic} is not ASCII")
        size_bytes = len(record.key) + len(record.value) + len(names) + len(values)
        if size_bytes > spec.max_record_bytes:
            raise RecordTooLarge(
                f"a record of {size_bytes} bytes for topic {record.topic}, "
                f"above the limit of {spec.max_record_bytes}",
                topic=record.topic,
                limit_bytes=spec.max_record_bytes,
            )


def check_same(spec: TopicSpec, existing: TopicSpec) -> None:
    """Raises BusError if an existing topic does not fit."""
    refuse_topics(*misfits([(spec, existing)]))


def misfits(pairs: Sequence[tuple[TopicSpec, TopicSpec]]) -> tuple[list[str], list[str]]:
    """Return misfits of (wanted, existing) topics, and hints."""
    few = [(spec, there) for spec, there in pairs if there.partitions < spec.partitions]
    small = [
        (spec, there) for spec, there in pairs if there.max_record_bytes < spec.max_record_bytes
    ]
    texts = [
        f"topic {spec.name} exists with {there.partitions} partitions, not {spec.partitions}"
        for spec, there in few
    ] + [
        f"topic {spec.name} exists with records of at most {there.max_record_bytes} bytes, "
        f"expected {spec.max_record_bytes}"
        for spec, there in small
    ]
    hints = []
    if few:
        least = min(there.partitions for _, there in few)
        hints.append(f"set bus.partitions = {least}, or add partitions to these topics")
    if small:
        limit = max(spec.max_record_bytes for spec, _ in small) + BATCH_ROOM_BYTES
        least = min(there.max_record_bytes for _, there in small)
        lower = f"set bus.max_record_bytes = {least}, or " if least >= RECORD_BYTES_LEAST else ""
        hints.append(f"{lower}raise max.message.bytes to {limit} for each of these topics")
    return texts, hints


def refuse_topics(texts: Sequence[str], hints: Sequence[str]) -> None:
    """Raises BusError if `texts` is not empty."""
    if texts:
        raise BusError("; ".join(texts), hint=f"{'; '.join(hints)}; or choose another run.name")


def check_position(tp: TopicPartition, position: int) -> None:
    """Raises BusError for an impossible position."""
    if not 0 <= position <= POSITION_MAX:
        raise BusError(f"{tp.topic}/{tp.partition} has no position {position}")


def check_not_truncated(tp: TopicPartition, position: int, end: int) -> None:
    """Raises LogTruncated if `position` is after `end`."""
    if position > end:
        raise LogTruncated(
            f"{tp.topic}/{tp.partition} ends at {end}, before the position {position}",
            hint="acknowledged records are lost; restore the log from a copy",
        )


def check_reaches(tp: TopicPartition, offset: int, end: int) -> None:
    """Raises LogTruncated if an acknowledged record is not before `end`."""
    if offset >= end:
        raise LogTruncated(
            f"{tp.topic}/{tp.partition} ends at {end} before offset {offset} of an "
            "acknowledged record",
            hint="restore the log from a copy",
        )


def is_trimmed(topic: str) -> bool:
    """Return whether old records may be deleted. Example: ``is_trimmed("demo.metrics")``"""
    return topic.rpartition(".")[2] in TRIMMED_TOPICS


def check_trimmed(tp: TopicPartition) -> None:
    """Raises BusError if the topic's records must be kept."""
    if not is_trimmed(tp.topic):
        raise BusError(f"{tp.topic} must be kept: only {', '.join(TRIMMED_TOPICS)} may be trimmed")


def first_kept(tp: TopicPartition, position: int, begin: int) -> int:
    """Return the position to continue at. Raises LogTruncated if a kept record was deleted."""
    if position < begin and not is_trimmed(tp.topic):
        raise LogTruncated(
            f"{tp.topic}/{tp.partition} begins at {begin}: the records from offset {position} on "
            "were deleted, and a run needs them",
            hint="set retention.ms and retention.bytes to -1 for all topics of a run; restore the "
            "log, or start a new run",
        )
    return max(position, begin)


def record_bytes(record: Append | Record) -> int:
    """Return the size of key, value and headers."""
    names, values = _joined_headers(record)
    return len(record.key) + len(record.value) + len(names) + len(values)


def _joined_headers(record: Append | Record) -> tuple[str, bytes]:
    """Join, because checking 15 headers one by one takes ten times as long."""
    if not record.headers:
        return "", b""
    names, values = zip(*record.headers, strict=True)
    return "".join(names), b"".join(values)


def topic_missing(topic: str) -> TopicMissing:
    """Return the error for a missing topic."""
    return TopicMissing(f"there is no topic {topic}", hint="`dora-pipe log topics` lists them")
