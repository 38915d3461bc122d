"""A plain queue between two processes behind the port of the log; it keeps and promises nothing.

It is what a `multiprocessing` queue is below its pickling: a pipe with one message per record.
Nothing in this house pickles, so the message is MessagePack around the bytes that a log would be
given. One process writes, one reads, each record once; a full pipe makes the writer wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Final

import msgspec

from dora_pipe.bench.dataplane.process import PARTITIONS
from dora_pipe.bus.port import Append, Bus, Reader, Record, TopicPartition, TopicSpec, Writer
from dora_pipe.config.model import Bus as Section
from dora_pipe.core.errors import BusError
from dora_pipe.store.log_location import LogLocation

PIPE: Final = "pipe"

_Message = tuple[str, int, bytes, bytes, tuple[tuple[str, bytes], ...]]
_MESSAGE: Final = msgspec.msgpack.Decoder(_Message)


def open_plane(address: str, *, reads: bool, claims: str = "") -> Bus:
    """A log by its address, or one end of a pipe: ``pipe:FD``. Raises what `open_bus` raises.

    `claims` is the directory in which a log's large values lie, as a run has it by default.
    """
    kind, _, rest = address.partition(":")
    if kind == PIPE:
        return PipeBus(int(rest), reads=reads)
    return LogLocation(run="", url=address, bus=Section(url=address), claims=claims).open()


class PipeBus(Bus):
    """One end of a pipe, by its file descriptor; `reads` says which end it is."""

    def __init__(self, fd: int, *, reads: bool) -> None:
        self._end = Connection(fd, readable=reads, writable=not reads)

    def create(self, topics: Sequence[TopicSpec]) -> None:
        """A pipe takes every topic."""

    def topics(self) -> list[str]:
        """It knows none."""
        return []

    def partitions(self, topic: str) -> int:
        """As many as the logs beside it have."""
        return PARTITIONS

    def begin(self, tp: TopicPartition) -> int:
        """Where its first reader begins."""
        return 0

    def trim(self, tp: TopicPartition, before: int) -> bool:
        """Nothing is kept."""
        return False

    def end(self, tp: TopicPartition) -> int:
        """Raises BusError."""
        raise BusError("a pipe does not know its end")

    def written_end(self, tp: TopicPartition) -> int:
        """Raises BusError."""
        return self.end(tp)

    def reader(self, positions: Mapping[TopicPartition, int]) -> PipeReader:
        """The reader; `positions` are where its counting starts."""
        return PipeReader(self._end, positions)

    def writer(self, *, exclusive: str | None = None) -> PipeWriter:
        """The writer; it fences nobody."""
        return PipeWriter(self._end)

    def close(self) -> None:
        """Close this end."""
        self._end.close()


class PipeWriter(Writer):
    """Puts one message per record into the pipe."""

    def __init__(self, end: Connection) -> None:
        self._end = end
        self._counts: dict[TopicPartition, int] = {}

    def append(self, records: Sequence[Append]) -> list[int]:
        """Write all; they are as safe as the reading process is alive."""
        offsets = []
        for one in records:
            message = (one.topic, one.partition, one.key, one.value, one.headers)
            self._end.send_bytes(msgspec.msgpack.encode(message))
            at = TopicPartition(one.topic, one.partition)
            offsets.append(self._counts.get(at, 0))
            self._counts[at] = offsets[-1] + 1
        return offsets

    def close(self) -> None:
        """The bus closes the end."""


class PipeReader(Reader):
    """Takes messages out of the pipe and counts them per partition."""

    def __init__(self, end: Connection, positions: Mapping[TopicPartition, int]) -> None:
        self._end = end
        self._positions = dict(positions)

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        """What is there. Raises BusError when the writer is gone."""
        found: list[Record] = []
        while len(found) < records_max and bytes_max > 0:
            if not self._end.poll(0.0 if found else timeout_s):
                break
            try:
                message = self._end.recv_bytes()
            except EOFError:
                if found:
                    break
                raise BusError("the other end of the pipe is closed") from None
            topic, partition, key, value, headers = _MESSAGE.decode(message)
            at = TopicPartition(topic, partition)
            offset = self._positions[at]
            self._positions[at] = offset + 1
            bytes_max -= len(value)
            found.append(
                Record(
                    topic=topic,
                    partition=partition,
                    offset=offset,
                    key=key,
                    value=value,
                    headers=headers,
                )
            )
        return found

    def position(self, tp: TopicPartition) -> int:
        """What was passed."""
        return self._positions[tp]

    def held_back(self) -> list[TopicPartition]:
        """Nothing ever is."""
        return []

    def seek(self, tp: TopicPartition, position: int) -> None:
        """Raises BusError."""
        raise BusError("what was read from a pipe is gone")

    def close(self) -> None:
        """The bus closes the end."""
