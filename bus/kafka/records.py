"""Conversion of Kafka's records, and a buffer for those above a poll's bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from dora_pipe.bus.checks import FILLER, record_bytes
from dora_pipe.core.pure.records import Record, TopicPartition


def records_of(polled: dict[Any, list[Any]]) -> list[Record]:
    """Return a poll's records without fillers."""
    return [
        Record(
            topic=each.topic,
            partition=each.partition,
            offset=each.offset,
            key=each.key or b"",
            value=each.value or b"",
            headers=tuple((name, value or b"") for name, value in each.headers),
        )
        for records in polled.values()
        for each in records
        if not (each.headers and each.headers[0][0] == FILLER)
    ]


class Fetched:
    """Records above the bounds of a poll, kept for the next."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], deque[Record]] = {}
        """Nonempty queues by partition."""

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, came: Sequence[Record], *, records_max: int, bytes_max: int) -> list[Record]:
        """Return records within the bounds, at least one."""
        for each in came:
            self._kept.setdefault(each.at, deque()).append(each)
        taken: list[Record] = []
        for partition in list(self._kept):
            waiting = self._kept[partition]
            while waiting and len(taken) < records_max:
                bytes_max -= record_bytes(waiting[0])
                if taken and bytes_max < 0:
                    return taken
                taken.append(waiting.popleft())
            if waiting:
                break
            del self._kept[partition]
        return taken

    def first(self, tp: TopicPartition) -> int | None:
        """Return a partition's first kept offset."""
        waiting = self._kept.get(tp)
        return waiting[0].offset if waiting else None

    def forget(self, tp: TopicPartition) -> None:
        self._kept.pop(tp, None)
