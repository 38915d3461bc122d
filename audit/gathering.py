"""Brings evidence of the trajectories topic as far as it is asked for; it decides nothing.

What was read and not asked for yet waits: records that nobody has named so far, or whose group is
open. Beyond `WAITING_MAX` the oldest wait on the disk, where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

from dora_pipe.audit.evidence import Evidence, Place, evidence_of
from dora_pipe.audit.reading import EMPTY_POLLS_MAX, wait_after
from dora_pipe.bus.port import Bus, Reader, TopicPartition
from dora_pipe.core.errors import BusError
from dora_pipe.schemas.fast_validate import FastValidator

WAITING_MAX: Final = 20_000
"""Evidence in memory; a piece is about a kilobyte."""

POLL_RECORDS: Final = 256
POLL_BYTES: Final = 4 * 1024 * 1024


class Source(Protocol):
    """Evidence of given partitions, in offset order per partition."""

    def poll(self, partition: int, timeout_s: float) -> list[Evidence]:
        """The next evidence, of this partition if others can wait; waits so long for the first.

        Raises BusError.
        """
        ...

    def position(self, partition: int) -> int:
        """Evidence below was given."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...


class SpillStore(Protocol):
    """Where evidence waits that is too much for memory."""

    def put(self, pieces: Iterable[Evidence]) -> None:
        """Keep these."""
        ...

    def take(self, place: Place) -> Evidence | None:
        """Give back one, which is not kept any longer."""
        ...

    def all(self) -> Iterator[Evidence]:
        """What is kept, by partition and offset."""
        ...


class OwnReader:
    """A `Source` in this process."""

    def __init__(
        self, bus: Bus, topic: str, positions: Mapping[int, int], *, opened: bool = True
    ) -> None:
        self._topic = topic
        self._glancer = FastValidator() if opened else None
        at = {TopicPartition(topic, one): position for one, position in positions.items()}
        self._reader: Reader = bus.reader(at)

    def poll(self, partition: int, timeout_s: float) -> list[Evidence]:
        """The next evidence, of whichever partition."""
        records = self._reader.poll(
            timeout_s=timeout_s, records_max=POLL_RECORDS, bytes_max=POLL_BYTES
        )
        return [evidence_of(record, self._glancer) for record in records]

    def position(self, partition: int) -> int:
        """Evidence below was given."""
        return self._reader.position(TopicPartition(self._topic, partition))

    def close(self) -> None:
        """Let go of the reader."""
        self._reader.close()


class EvidenceBuffer:
    """What was read of the topic and not been judged; `ends` bounds what is read.

    `fresh` opens a source at positions, when the first evidence is needed.
    """

    def __init__(self) -> None:
        self.spilled: SpillStore | None = None
        self._source: Source | None = None
        self.positions: dict[int, int] = {}
        """Per partition: everything below was read."""
        self.last: dict[int, tuple[int, str]] = {}
        """Per partition: offset and sha256 of the last record that was read."""
        self.waiting: dict[Place, Evidence] = {}
        self._ends: dict[int, int] = {}
        self._reads: list[int] = []

    def begin(self, ends: Mapping[int, int], fresh: Callable[[dict[int, int]], Source]) -> None:
        """Read on, up to these ends."""
        self.close()
        self._ends = dict(ends)
        for partition in ends:
            self.positions.setdefault(partition, 0)
        behind = {one: self.positions[one] for one in ends if self.positions[one] < ends[one]}
        self._reads = list(behind)
        if behind:
            self._source = fresh(behind)

    def read_to(self, partition: int, offset: int) -> None:
        """Read until this offset has been passed, or the end."""
        target = min(offset + 1, self._ends.get(partition, 0))
        empty = 0
        while self.positions.get(partition, target) < target:
            assert self._source is not None
            before = self.positions[partition]
            pieces = self._source.poll(partition, wait_after(empty))
            for one in pieces:
                self._keep(one)
            for each in self._reads:
                position = min(self._source.position(each), self._ends[each])
                self.positions[each] = max(self.positions[each], position)
            moved = pieces or self.positions[partition] > before
            empty = 0 if moved else empty + 1
            if empty > EMPTY_POLLS_MAX:
                raise BusError(f"partition {partition} gives no more records before its end")
        self._overflow()

    def read_all(self) -> None:
        """Read up to the ends."""
        for partition, end in self._ends.items():
            self.read_to(partition, end)

    def take(self, place: Place) -> Evidence | None:
        """The evidence of a place, if it was read; it waits no longer."""
        found = self.waiting.pop(place, None)
        if found is None and self.spilled is not None:
            found = self.spilled.take(place)
        return found

    def rest(self) -> Iterator[Evidence]:
        """What nobody has taken, by partition and offset."""
        waiting = sorted(self.waiting.values(), key=lambda one: one.place)
        if self.spilled is None:
            yield from waiting
            return
        yield from sorted([*self.spilled.all(), *waiting], key=lambda one: one.place)

    def close(self) -> None:
        """Let go of the source."""
        if self._source is not None:
            self._source.close()
            self._source = None

    def _keep(self, one: Evidence) -> None:
        if one.offset < self._ends[one.partition]:
            self.waiting[one.partition, one.offset] = one
            self.last[one.partition] = one.offset, one.sha256

    def _overflow(self) -> None:
        if self.spilled is None or len(self.waiting) <= WAITING_MAX:
            return
        oldest = [self.waiting.pop(place) for place in list(self.waiting)[: WAITING_MAX // 2]]
        self.spilled.put(oldest)
