"""Tests of a trainer's restart from a snapshot of its commits, on each bus."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.base import BusWrapper, ReaderWrapper
from dora_pipe.bus.bus import Bus, Reader, TopicSpec
from dora_pipe.consumers.trainer.commits import CommitHistory, decode_history, encode_history
from dora_pipe.consumers.trainer.recovery import read_history, write_snapshot
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.account_stage import taken
from tests.support.bus_steps import Harness

CLOCK = SystemClock()


class CountingBus(BusWrapper):
    read = 0

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return _CountingReader(self.inner.reader(positions), self)


class _CountingReader(ReaderWrapper):
    def __init__(self, inner: Reader, bus: CountingBus) -> None:
        super().__init__(inner)
        self._bus = bus

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        polled = super().poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        self._bus.read += len(polled)
        return polled


def log_of(bus: Bus, topics: Topics, first: int, steps: int, *, incarnation: int = 0) -> None:
    facts: list[AnyControl] = []
    if first == 0:
        facts = [records.run_started(records.make_config(run__name=topics.run))]
    facts.append(records.role_started("trainer", incarnation))
    for step in range(first, first + steps):
        group = taken(f"g{step:010d}")
        facts.append(records.committed(step, (group,), incarnation=incarnation))
        facts.append(records.command("pause"))
    bus.writer().append([Append(topic=topics.control, value=encode(fact)) for fact in facts])


def begun(harness: Harness, steps: int) -> tuple[CountingBus, Topics]:
    topics = Topics(harness.topic("r").replace(".", "-"))
    bus = CountingBus(harness.open())
    bus.create([TopicSpec(name=topics.control)])
    log_of(bus, topics, 0, steps)
    return bus, topics


@pytest.mark.parametrize("steps", [10, 100])
def test_restart_reads_equally_many_records_however_long_the_run(
    harness: Harness, tmp_path: Path, steps: int
) -> None:
    bus, topics = begun(harness, steps)
    snapshot = tmp_path / "snapshots" / "commits"
    write_snapshot(snapshot, encode_history(read_history(bus, topics, CLOCK)))
    log_of(bus, topics, steps, 2, incarnation=1)
    bus.read = 0
    history = read_history(bus, topics, CLOCK, snapshot)
    assert bus.read == 7, "the last commit of the snapshot and what follows it"
    assert history == read_history(bus, topics, CLOCK)
    assert (history.next_step, history.incarnation) == (steps + 2, 1)


@pytest.mark.parametrize(
    "kind", ["missing", "empty", "damaged", "beyond the end", "no commit", "other weights"]
)
def test_restart_without_a_matching_snapshot_reads_everything_and_logs_why(
    harness: Harness, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.DEBUG, "dora_pipe.consumers.trainer")
    bus, topics = begun(harness, 3)
    history, snapshot = read_history(bus, topics, CLOCK), tmp_path / "commits"
    last, other = history.notes[-1], read_history(bus, topics, CLOCK)
    changes: dict[str, dict[str, Any]] = {
        "beyond the end": {"offset": last.offset + 100},
        "no commit": {"offset": last.offset + 1},
        "other weights": {"digest": "other"},
    }
    other.notes[-1] = replace(last, **changes.get(kind, {}))
    content = {"empty": b"", "damaged": encode_history(other)[:-1] + b" "}
    if kind != "missing":
        write_snapshot(snapshot, content.get(kind, encode_history(other)))
    bus.read = 0
    assert read_history(bus, topics, CLOCK, snapshot) == history
    assert bus.read >= 2 + 2 * 3
    assert "snapshot skipped: " in caplog.text


def test_snapshot_from_other_code_is_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encode_history(CommitHistory())
    monkeypatch.setattr("dora_pipe.consumers.trainer.commits._source", lambda: b"other code")
    with pytest.raises(ValueError, match="written by other code"):
        decode_history(content)
