"""Tests of the log contract on all three buses, and on broken buses that must fail it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog, MemoryReader, MemoryWriter
from dora_pipe.core.errors import BusError, OutcomeUnknown, TopicMissing
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from tests.support import bus_checks_reading as reading
from tests.support import bus_contract as writing
from tests.support import bus_steps
from tests.support.bus_contract import CHECKS
from tests.support.bus_harness import MemoryHarness
from tests.support.bus_steps import Check, Harness


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_bus(harness: Harness, check: Check) -> None:
    check(harness)


# Buses that break one promise each: the contract is worth as much as what it refuses.


class DenseLog(MemoryLog):
    def gap_after(self, append: int) -> int:
        return 0


class LastOffsetReader(MemoryReader):
    def __init__(self, bus: MemoryBus, positions: Mapping[TopicPartition, int]) -> None:
        super().__init__(bus, positions)
        self._seen = dict(positions)

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 1 << 25
    ) -> list[Record]:
        records = super().poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        self._seen.update({record.at: record.offset + 1 for record in records})
        return records

    def position(self, tp: TopicPartition) -> int:
        return self._seen[tp]


class CarefreeReader(MemoryReader):
    def held_back(self) -> list[TopicPartition]:
        return []


class HeaderlessReader(MemoryReader):
    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 1 << 25
    ) -> list[Record]:
        records = super().poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        return [replace(each, headers=tuple(h for h in each.headers if h[1])) for each in records]


class UnboundedReader(MemoryReader):
    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 1 << 25
    ) -> list[Record]:
        return super().poll(timeout_s=timeout_s, records_max=records_max)


class UnfencedWriter(MemoryWriter):
    def _check_writable(self) -> None:
        if self._name is not None:
            self._epoch = self._bus.log._epochs[self._name]
        super()._check_writable()


class OneByOneWriter(MemoryWriter):
    def append(self, records: Sequence[Append]) -> list[int]:
        append = super().append
        return [offset for record in records for offset in append([record])]


class ConfidentWriter(MemoryWriter):
    def append(self, records: Sequence[Append]) -> list[int]:
        try:
            return super().append(records)
        except OutcomeUnknown as error:
            raise BusError(error.message) from error


class StubbornWriter(MemoryWriter):
    def append(self, records: Sequence[Append]) -> list[int]:
        self._broken = False
        return super().append(records)


class CreatingBus(MemoryBus):
    def partitions(self, topic: str) -> int:
        try:
            return super().partitions(topic)
        except TopicMissing:
            self.create([TopicSpec(name=topic)])
            raise


def reads(reader: type[MemoryReader]) -> MemoryHarness:
    class Broken(MemoryBus):
        def reader(self, positions: Mapping[TopicPartition, int]) -> MemoryReader:
            super().reader(positions)
            return reader(self, positions)

    return MemoryHarness(bus=Broken)


def writes(writer: type[MemoryWriter]) -> MemoryHarness:
    class Broken(MemoryBus):
        def writer(self, *, exclusive: str | None = None) -> MemoryWriter:
            self.check_open()
            return writer(self, exclusive)

    return MemoryHarness(bus=Broken)


BROKEN: list[tuple[MemoryHarness, Check]] = [
    (MemoryHarness(DenseLog()), reading.offsets_increase_and_leave_gaps),
    (MemoryHarness(DenseLog()), reading.caught_up_means_position_and_not_last_offset),
    (reads(LastOffsetReader), reading.caught_up_means_position_and_not_last_offset),
    (reads(CarefreeReader), reading.readers_know_that_they_are_held_back),
    (reads(HeaderlessReader), reading.headers_keys_and_values_come_back_as_they_were),
    (reads(UnboundedReader), reading.polls_are_bounded_by_records_and_bytes),
    (writes(UnfencedWriter), writing.a_newer_exclusive_writer_fences_the_older_one),
    (writes(OneByOneWriter), writing.a_record_too_large_is_refused_with_its_whole_call),
    (writes(ConfidentWriter), writing.an_unknown_outcome_is_said_and_an_exclusive_writer_stops),
    (writes(StubbornWriter), writing.an_unknown_outcome_is_said_and_an_exclusive_writer_stops),
    (MemoryHarness(bus=CreatingBus), writing.what_does_not_exist_is_missing),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN)
def test_a_bus_that_breaks_a_promise_fails_the_contract(
    broken: MemoryHarness, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bus_steps, reading):
        monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    with pytest.raises((AssertionError, pytest.fail.Exception, BusError)):
        check(broken)


def test_a_bus_with_dense_offsets_fails_and_is_told_why() -> None:
    with pytest.raises(AssertionError, match="dense"):
        reading.offsets_increase_and_leave_gaps(MemoryHarness(DenseLog()))
