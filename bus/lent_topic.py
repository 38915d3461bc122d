"""A log one of whose topics lies in the log of another run; decides where each is read.

A run that trains on another's trajectories has none of its own: what is read as its topic is the
other's, at the other's places. That log's topics can be read by their own names too. Whatever is
written goes into the run's own log, never into the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dora_pipe.bus.base import BusWrapper
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.core.errors import BusError


class LentTopicBus(BusWrapper):
    """Own log and that of the lender; closes both.

    Example: ``LentTopicBus(own, lender, lent={"again.trajectories": "demo.trajectories"},
    others=("demo.control",))``
    """

    def __init__(
        self,
        own: Bus,
        lender: Bus,
        *,
        lent: Mapping[str, str],
        others: tuple[str, ...] = (),
        change: Callable[[str], bytes] | None = None,
    ) -> None:
        """`lent` are names here and there; `others` are read under the lender's names; `change`
        gives the file, by its sha256, that says what of the lent records counts otherwise."""
        super().__init__(own)
        self.lender = lender
        self.change = change
        self._names = {**{name: name for name in others}, **lent}
        """Of the lender's topics, by what they are called here."""

    def place(self, tp: TopicPartition) -> TopicPartition | None:
        """Where it lies in the lender's log; None for the run's own."""
        name = self._names.get(tp.topic)
        return None if name is None else TopicPartition(name, tp.partition)

    def partitions(self, topic: str) -> int:
        name = self._names.get(topic)
        return self.inner.partitions(topic) if name is None else self.lender.partitions(name)

    def begin(self, tp: TopicPartition) -> int:
        there = self.place(tp)
        return self.inner.begin(tp) if there is None else self.lender.begin(there)

    def trim(self, tp: TopicPartition, before: int) -> bool:
        if self.place(tp) is not None:
            raise BusError(f"{tp.topic} is lent: nothing of it is deleted from here")
        return self.inner.trim(tp, before)

    def end(self, tp: TopicPartition) -> int:
        there = self.place(tp)
        return self.inner.end(tp) if there is None else self.lender.end(there)

    def written_end(self, tp: TopicPartition) -> int:
        there = self.place(tp)
        return self.inner.written_end(tp) if there is None else self.lender.written_end(there)

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return _LentReader(self, positions)

    def close(self) -> None:
        self.inner.close()
        self.lender.close()


def lent_topic(bus: Bus) -> LentTopicBus | None:
    """The log, whatever is around it, if it borrows a topic."""
    while isinstance(bus, BusWrapper) and not isinstance(bus, LentTopicBus):
        bus = bus.inner
    return bus if isinstance(bus, LentTopicBus) else None


class _LentReader(Reader):
    """Reads the run's own log, then the lender's: what lies there has been written long ago."""

    def __init__(self, bus: LentTopicBus, positions: Mapping[TopicPartition, int]) -> None:
        places = {tp: bus.place(tp) for tp in positions}
        self._there = {tp: there for tp, there in places.items() if there is not None}
        self._here = {there: tp for tp, there in self._there.items()}
        own = {tp: at for tp, at in positions.items() if tp not in self._there}
        lent = {there: positions[tp] for tp, there in self._there.items()}
        self._own = bus.inner.reader(own) if own or not lent else None
        self._lent = bus.lender.reader(lent) if lent else None

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        found: list[Record] = []
        if self._own is not None:
            wait_s = timeout_s if self._lent is None else 0.0
            found = self._own.poll(timeout_s=wait_s, records_max=records_max, bytes_max=bytes_max)
        if found or self._lent is None:
            return found
        records = self._lent.poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        return [replace(one, topic=self._here[one.at].topic) for one in records]

    def position(self, tp: TopicPartition) -> int:
        there = self._there.get(tp)
        if there is not None and self._lent is not None:
            return self._lent.position(there)
        return self._of_own(tp).position(tp)

    def held_back(self) -> list[TopicPartition]:
        found = [] if self._own is None else self._own.held_back()
        lent = [] if self._lent is None else self._lent.held_back()
        return sorted([*found, *(self._here[one] for one in lent)])

    def seek(self, tp: TopicPartition, position: int) -> None:
        there = self._there.get(tp)
        if there is not None and self._lent is not None:
            self._lent.seek(there, position)
        else:
            self._of_own(tp).seek(tp, position)

    def close(self) -> None:
        for one in (self._own, self._lent):
            if one is not None:
                one.close()

    def _of_own(self, tp: TopicPartition) -> Reader:
        if self._own is None:
            raise BusError(f"this reader does not read {tp.topic}/{tp.partition}")
        return self._own
