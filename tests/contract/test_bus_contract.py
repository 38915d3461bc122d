"""One contract over all three buses, and broken buses that must fail it."""

from __future__ import annotations

import pytest

from dora_pipe.core.errors import BusError
from tests.support import bus_checks_reading as reading
from tests.support import bus_checks_writing as writing
from tests.support import bus_steps
from tests.support.bus_broken import (
    CarefreeReader,
    ConfidentWriter,
    CreatingBus,
    DenseLog,
    HeaderlessReader,
    LastOffsetReader,
    OneByOneWriter,
    StubbornWriter,
    UnboundedReader,
    UnfencedWriter,
    bus_with,
)
from tests.support.bus_contract import CHECKS
from tests.support.bus_harness import MemoryHarness
from tests.support.bus_steps import Check, Harness


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_bus(harness: Harness, check: Check) -> None:
    check(harness)


BROKEN: list[tuple[MemoryHarness, Check]] = [
    (MemoryHarness(DenseLog()), reading.offsets_increase_and_leave_gaps),
    (MemoryHarness(DenseLog()), reading.caught_up_means_position_and_not_last_offset),
    (
        MemoryHarness(bus=bus_with(reader=LastOffsetReader)),
        reading.caught_up_means_position_and_not_last_offset,
    ),
    (
        MemoryHarness(bus=bus_with(reader=CarefreeReader)),
        reading.readers_know_that_they_are_held_back,
    ),
    (
        MemoryHarness(bus=bus_with(reader=HeaderlessReader)),
        reading.headers_keys_and_values_come_back_as_they_were,
    ),
    (
        MemoryHarness(bus=bus_with(reader=UnboundedReader)),
        reading.polls_are_bounded_by_records_and_bytes,
    ),
    (
        MemoryHarness(bus=bus_with(writer=UnfencedWriter)),
        writing.a_newer_exclusive_writer_fences_the_older_one,
    ),
    (
        MemoryHarness(bus=bus_with(writer=OneByOneWriter)),
        writing.a_record_too_large_is_refused_with_its_whole_call,
    ),
    (
        MemoryHarness(bus=bus_with(writer=ConfidentWriter)),
        writing.an_unknown_outcome_is_said_and_an_exclusive_writer_stops,
    ),
    (
        MemoryHarness(bus=bus_with(writer=StubbornWriter)),
        writing.an_unknown_outcome_is_said_and_an_exclusive_writer_stops,
    ),
    (MemoryHarness(bus=CreatingBus), writing.what_does_not_exist_is_missing),
]


@pytest.mark.parametrize(("broken", "check"), BROKEN)
def test_a_bus_that_breaks_a_promise_fails_the_contract(
    broken: MemoryHarness, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bus_steps, "PATIENCE_S", 0.5)
    with pytest.raises((AssertionError, pytest.fail.Exception, BusError)):
        check(broken)


def test_a_bus_with_dense_offsets_fails_and_is_told_why() -> None:
    with pytest.raises(AssertionError, match="dense"):
        reading.offsets_increase_and_leave_gaps(MemoryHarness(DenseLog()))
