"""Tests of the trajectory reader and its bounded cache."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.base import BusWrapper, ReaderWrapper
from dora_pipe.bus.bus import Reader
from dora_pipe.bus.logged import RecordPlace
from dora_pipe.bus.memory import AppendFault, MemoryBus
from dora_pipe.consumers.trainer.batch_reader import BatchReader, FetchedRecord
from dora_pipe.core.errors import BusError, LogTruncated
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.schemas.control import TakenGroup
from dora_pipe.schemas.identity import group_id, trajectory_id
from tests.support.batches import make_trajectory
from tests.support.bus_steps import ScriptedFaults
from tests.support.trainer_stage import PARTITIONS, RUN, TrainerStage


@pytest.fixture
def stage(tmp_path: Path) -> TrainerStage:
    return TrainerStage(tmp_path)


def reader_of(stage: TrainerStage, **options: Any) -> BatchReader:
    starts = options.pop("starts", {})
    return BatchReader(
        options.pop("bus", stage.open_bus()),
        stage.topics.trajectories,
        run=RUN,
        starts=starts,
        clock=stage.clock,
        **options,
    )


def memory_bus(stage: TrainerStage, **faults: Any) -> MemoryBus:
    return MemoryBus(
        stage.log, faults=ScriptedFaults(**faults), now_ms=lambda: stage.clock.ns // 1_000_000
    )


def places(*groups: TakenGroup) -> list[RecordPlace]:
    return [
        RecordPlace(trajectory.partition, trajectory.offset)
        for group in groups
        for trajectory in group.trajectories
    ]


def find(reader: BatchReader, *groups: TakenGroup) -> dict[RecordPlace, FetchedRecord]:
    for _ in range(100):
        result = reader.find(places(*groups), timeout_s=0.0)
        if result is not None:
            return result
    raise AssertionError("never reached")


def readable(records: dict[RecordPlace, FetchedRecord]) -> bool:
    return all(record.headers is not None and not record.why for record in records.values())


def test_what_was_read_ahead_is_found_without_a_seek(stage: TrainerStage) -> None:
    groups = [stage.log_group(ordinal) for ordinal in range(4)]
    reader = reader_of(stage)
    assert reader.read_ahead(timeout_s=0.0) == 8
    assert reader.records == 8
    result = find(reader, *groups)
    assert readable(result)
    assert reader.seeks == 0
    for group in groups:
        for taken in group.trajectories:
            record = result[RecordPlace(taken.partition, taken.offset)]
            assert record.headers is not None
            assert record.headers.trajectory == taken.trajectory
            assert record.sha256 == taken.sha256


def test_place_that_is_not_visible_yet_is_waited_for(stage: TrainerStage) -> None:
    early = stage.log_group(0)
    late = AppendFault(kind="delayed", delay_ms=5000)
    stage.writer = memory_bus(stage, appends={0: late}).writer()
    group = stage.log_group(2)
    reader = reader_of(stage)
    expected_places = places(early, group)
    assert reader.find(expected_places, timeout_s=0.0) is None
    assert f"not yet {expected_places[2].offset}" in reader.waits_for
    stage.clock.sleep(5)
    assert readable(find(reader, early, group))
    assert reader.waits_for == ""


def test_place_that_the_log_never_reaches_stops_the_run(stage: TrainerStage) -> None:
    stage.log_group(0)
    reader = reader_of(stage)
    reader.read_ahead(timeout_s=0.0)
    beyond = [RecordPlace(0, 10_000)]
    assert reader.find(beyond, timeout_s=0.0) is None
    stage.clock.sleep(119)
    assert reader.find(beyond, timeout_s=0.0) is None
    stage.clock.sleep(2)
    with pytest.raises(LogTruncated, match="before offset 10000"):
        reader.find(beyond, timeout_s=0.0)


def test_a_busy_partition_does_not_hide_a_lost_one(stage: TrainerStage) -> None:
    reader = reader_of(stage)
    with pytest.raises(LogTruncated, match=r"/0 ends at .* before offset 10000"):
        for second in range(130):
            stage.log_group(1 + PARTITIONS * second)
            assert reader.find([RecordPlace(0, 10_000)], timeout_s=0.0) is None
            stage.clock.sleep(1)


class _SlowReader(ReaderWrapper):
    slow = True

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        return [] if self.slow else super().poll(timeout_s=timeout_s, records_max=records_max)


class _SlowBus(BusWrapper):
    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return _SlowReader(self.inner.reader(positions))


def test_a_slow_log_is_waited_for_and_named(
    stage: TrainerStage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = stage.log_group(0)
    reader = reader_of(stage, bus=_SlowBus(stage.open_bus()))
    for _ in range(130):
        assert reader.find(places(group), timeout_s=0.0) is None
        stage.clock.sleep(1)
    assert "a quota, a slow link" in caplog.text
    monkeypatch.setattr(_SlowReader, "slow", False)
    assert readable(find(reader, group))


def test_evicted_records_are_read_again_from_their_place(stage: TrainerStage) -> None:
    groups = [stage.log_group(ordinal, deadline=ordinal) for ordinal in range(20)]
    reader = reader_of(stage, records_max=10)
    while reader.read_ahead(timeout_s=0.0):
        assert reader.records <= 10
    # The earliest deadlines stay cached: they are needed first.
    assert readable(find(reader, *groups[:5]))
    assert reader.seeks == 0
    assert readable(find(reader, *groups[5:]))
    assert reader.seeks == 30


def test_cache_is_bounded_in_bytes_too(stage: TrainerStage) -> None:
    groups = [stage.log_group(ordinal) for ordinal in range(10)]
    reader = reader_of(stage, bytes_max=4000)
    reader.read_ahead(timeout_s=0.0)
    assert 0 < reader.bytes <= 4000
    assert reader.records < 20
    assert readable(find(reader, *groups))
    reader.drop_before(10)
    assert (reader.records, reader.bytes) == (0, 0)


def test_records_before_the_start_are_read_from_their_place(stage: TrainerStage) -> None:
    early, late = stage.log_group(0), stage.log_group(2)
    reader = reader_of(stage, starts={0: places(late)[0].offset})
    reader.read_ahead(timeout_s=0.0)
    assert reader.records == 2
    assert readable(find(reader, early, late))
    assert reader.seeks == 2


def test_reader_starts_where_retention_left_the_log(stage: TrainerStage) -> None:
    old, kept = stage.log_group(0), stage.log_group(PARTITIONS)
    begin = kept.trajectories[0].offset
    stage.log.delete_before(TopicPartition(stage.topics.trajectories, 0), begin)
    reader = reader_of(stage)
    assert readable(find(reader, kept))
    with pytest.raises(LogTruncated, match="were deleted"):
        find(reader, old)


def test_overdue_and_evaluation_records_are_not_kept(stage: TrainerStage) -> None:
    stage.log_group(0, deadline=3)
    late = stage.log_group(1, deadline=4)
    for sample in range(2):
        stage.log_trajectory(
            make_trajectory(
                trajectory_id(group_id("eval", 1), sample), run=RUN, deadline=-1, digest="0" * 64
            )
        )
    reader = reader_of(stage)
    reader.drop_before(4)
    reader.read_ahead(timeout_s=0.0)
    assert reader.records == 2
    assert readable(find(reader, late))
    reader.drop_before(5)
    assert reader.records == 0
    assert reader.dead_letters() == []


def damaged(stage: TrainerStage, kind: str) -> RecordPlace:
    if kind == "no headers":
        append = Append(topic=stage.topics.trajectories, value=b"x", key=b"k")
        (offset,) = stage.writer.append([append])
        return RecordPlace(0, offset)
    changes: dict[str, dict[str, Any]] = {
        "other bytes": {"sha256": "b" * 64},
        "another run": {"run": "stranger"},
        "no trajectory id": {"trajectory": "g12"},
    }
    trajectory = make_trajectory(trajectory_id(group_id("train", 8), 0), run=RUN)
    taken = stage.log_trajectory(trajectory, partition=0, **changes[kind])
    return RecordPlace(taken.partition, taken.offset)


@pytest.mark.parametrize("kind", ["no headers", "other bytes", "another run", "no trajectory id"])
def test_unreadable_record_becomes_a_dead_letter_and_its_partition_goes_on(
    stage: TrainerStage, kind: str
) -> None:
    location = damaged(stage, kind)
    after = stage.log_group(0)
    reader = reader_of(stage)
    assert readable(find(reader, after))
    (letter,) = reader.dead_letters()
    assert (letter.topic, letter.partition, letter.offset) == (stage.topics.trajectories, *location)
    assert letter.reason
    assert letter.value is not None
    assert reader.dead_letters() == []
    result = reader.find([location], timeout_s=0.0)
    assert result is not None
    assert result[location].why.startswith("unreadable: ")
    assert reader.dead_letters() == []  # reported when it was read first


def test_place_without_a_record_and_partition_that_does_not_exist_are_unreadable(
    stage: TrainerStage,
) -> None:
    first = places(stage.log_group(0))[-1]
    stage.log_group(0)
    gap = RecordPlace(first.partition, first.offset + 1)
    reader = reader_of(stage)
    expected = [gap, RecordPlace(PARTITIONS, 0), RecordPlace(-1, 3)]
    reader.read_ahead(timeout_s=0.0)
    result = reader.find(expected, timeout_s=0.0)
    assert result is not None
    assert set(result) == set(expected)
    assert all("the log has no record at its offset" in result.why for result in result.values())


def test_log_that_stays_away_is_an_error(stage: TrainerStage) -> None:
    group = stage.log_group(0)
    bus = memory_bus(stage, polls=range(10_000))
    with pytest.raises(BusError, match="cannot be reached"):
        find(reader_of(stage, bus=bus), group)
