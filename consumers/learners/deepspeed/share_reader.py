"""Reads single trajectories from their places in the log; decides nothing but how far to read on.

A rank of the trainer reads its share of a batch with it. What it gives was checked by the one who
took the batch; here only the bytes are compared, because they come from the log once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from dora_pipe.bus.port import Bus, Record
from dora_pipe.consumers.learners.port import LoggedAt
from dora_pipe.consumers.place_reader import Place, PlaceReader
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import sha256_hex

GAP: Final = 2
"""Offsets this close are read in one go: Kafka has a transaction's marker between two records."""


class ShareReader:
    """Example: ``ShareReader(bus, "demo.trajectories", clock).read([LoggedAt(...), ...])``."""

    def __init__(self, bus: Bus, topic: str, clock: Clock) -> None:
        self._topic = topic
        self._reader = PlaceReader(bus, topic, clock, gap=GAP)
        self.records = 0
        """Read so far, those between the wanted ones among them."""

    def read(self, places: Sequence[LoggedAt]) -> list[Trajectory]:
        """The trajectories at these places, in their order.

        Raises InvariantBroken for one that is not there with those bytes, BusError.
        """
        found: dict[tuple[int, int], Record] = {}
        for record in self._reader.read(Place(one.partition, one.offset) for one in places):
            found[record.partition, record.offset] = record
            self.records += 1
        return [self._decoded(place, found) for place in places]

    def close(self) -> None:
        """Close the readers; idempotent."""
        self._reader.close()

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
