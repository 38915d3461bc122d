"""Reads single trajectories from their places in the log; decides nothing but how far to read on.

A rank of the trainer reads its share of a batch with it. What it gives was checked by the one who
took the batch; here only the bytes are compared, because they come from the log once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.clock import Clock
from dora_pipe.consumers.trainers.port import LoggedAt
from dora_pipe.errors import BusError, InvariantBroken, SchemaError
from dora_pipe.patience import patiently
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import sha256_hex

POLL_S: Final = 1.0
"""One wait for records that are known to be there."""

EMPTY_POLLS_MAX: Final = 60
"""So many waits in vain, one after the other, and the log counts as unreachable."""

GAP: Final = 2
"""Offsets this close are read in one go: Kafka has a transaction's marker between two records."""


class ShareReader:
    """Example: ``ShareReader(bus, "demo.trajectories", clock).read([LoggedAt(...), ...])``."""

    def __init__(self, bus: Bus, topic: str, clock: Clock) -> None:
        self._bus = bus
        self._topic = topic
        self._clock = clock
        self._readers: dict[int, Reader] = {}
        self.records = 0
        """Read so far, those between the wanted ones among them."""

    def read(self, places: Sequence[LoggedAt]) -> list[Trajectory]:
        """The trajectories at these places, in their order.

        Raises InvariantBroken for one that is not there with those bytes, BusError.
        """
        found: dict[tuple[int, int], Record] = {}
        for run in _runs(places):
            for record in self._read_run(run):
                found[record.partition, record.offset] = record
        return [self._decoded(place, found) for place in places]

    def close(self) -> None:
        """Close the readers; idempotent."""
        for reader in self._readers.values():
            reader.close()

    def _decoded(self, place: LoggedAt, found: dict[tuple[int, int], Record]) -> Trajectory:
        record = found.get((place.partition, place.offset))
        where = f"{self._topic}/{place.partition} offset {place.offset}"
        if record is None:
            raise InvariantBroken(f"{where} is empty, where a trajectory of the batch was")
        if sha256_hex(record.value) != place.sha256:
            raise InvariantBroken(f"{where} has other bytes than the batch was taken with")
        try:
            return decode_trajectory(record.value)
        except SchemaError as error:
            raise InvariantBroken(f"{where} cannot be read: {error.message}") from error

    def _read_run(self, run: Sequence[LoggedAt]) -> list[Record]:
        partition, first, last = run[0].partition, run[0].offset, run[-1].offset
        at = TopicPartition(self._topic, partition)
        if partition not in self._readers:
            self._readers[partition] = patiently(
                "reading a share", lambda: self._bus.reader({at: first}), self._clock
            )
        reader = self._readers[partition]
        reader.seek(at, first)
        records: list[Record] = []
        empty = 0
        while reader.position(at) <= last:
            polled = patiently(
                "reading a share",
                lambda: reader.poll(timeout_s=POLL_S, records_max=last - first + 1),
                self._clock,
            )
            records += polled
            empty = 0 if polled else empty + 1
            if empty > EMPTY_POLLS_MAX:
                raise BusError(f"{self._topic}/{partition} has records that do not come")
        self.records += len(records)
        return records


def _runs(places: Sequence[LoggedAt]) -> list[list[LoggedAt]]:
    """Places of one partition that lie close together, sorted."""
    runs: list[list[LoggedAt]] = []
    for place in sorted(places, key=lambda one: (one.partition, one.offset)):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and last.partition == place.partition
            and place.offset - last.offset <= GAP
        ):
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs
