"""Tests of the log follower: listeners, counts, errors."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from dora_pipe.bus.base import BusWrapper, ReaderWrapper
from dora_pipe.bus.bus import Reader, TopicSpec
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.core.errors import BusError, LogTruncated
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.ledger import follower as under_test
from dora_pipe.ledger.follower import LogFollower, LogMeter, Position, TopicCount
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.metrics import AnyMetrics, Cost, TrainerStatus
from dora_pipe.schemas.rounds import Round, StopRun
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records

TOPICS = Topics("demo")
METRICS = TopicPartition(TOPICS.metrics, 0)


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def fact(self, offset: int, fact: AnyControl) -> None:
        self.said.append(f"fact {offset}")

    def round(self, round_: Round, offset: int) -> None:
        self.said.append(f"round {round_.ordinal}")


@pytest.fixture
def bus() -> MemoryBus:
    bus = MemoryBus()
    names = (TOPICS.control, TOPICS.decisions, TOPICS.metrics)
    bus.create([TopicSpec(name=name) for name in names])
    return bus


def append(bus: MemoryBus, topic: str, *values: msgspec.Struct | bytes) -> list[int]:
    encoded = (value if isinstance(value, bytes) else encode(value) for value in values)
    return bus.writer().append([Append(topic=topic, value=value) for value in encoded])


def round_(ordinal: int, control_next: int, *, stops: bool = False) -> Round:
    decisions = (StopRun(reason="all steps"),) if stops else ()
    return Round(
        ordinal=ordinal,
        incarnation=0,
        now_ns=1,
        control_next=control_next,
        decisions=decisions,
        chain=f"chain {ordinal}",
    )


def status(at_ns: int) -> TrainerStatus:
    cost = Cost(total_s=0.0, bus_s=0.0, control_s=0.0, codec_s=0.0, rss_bytes=0)
    return TrainerStatus(
        at_ns=at_ns,
        cost=cost,
        incarnation=0,
        step=0,
        phase="idle",
        cached_records=0,
        cached_bytes=0,
    )


def read(follower: LogFollower) -> None:
    while follower.advance():
        pass


def test_every_reader_hears_a_round_behind_the_facts_that_it_folds(bus: MemoryBus) -> None:
    append(bus, TOPICS.control, *(records.joined(name) for name in ("w0", "w1", "w2")))
    append(bus, TOPICS.decisions, round_(0, 1), round_(1, 2))
    first, second = Heard(), Heard()
    follower = LogFollower(bus, TOPICS, first, second)
    read(follower)
    assert first.said == ["fact 0", "round 0", "fact 1", "round 1"]
    assert second.said == first.said
    assert (follower.chain, follower.over) == ("chain 1", False)
    append(bus, TOPICS.decisions, round_(2, 2, stops=True))
    read(follower)
    assert first.said[4:] == ["round 2", "fact 2"], "what is behind the last round comes last"
    assert follower.over


def test_records_are_counted_and_those_that_cannot_be_read_are_left_out(bus: MemoryBus) -> None:
    append(bus, TOPICS.control, records.joined("w0"), b"{")
    append(bus, TOPICS.decisions, b"no round", round_(0, 2))
    append(bus, TOPICS.metrics, b"?", status(5))
    heard, statuses, meter = Heard(), list[AnyMetrics](), LogMeter()
    follower = LogFollower(bus, TOPICS, heard, statuses=statuses.append, meter=meter)
    read(follower)
    assert heard.said == ["fact 0", "round 0"]
    assert [status.at_ns for status in statuses] == [5]
    assert follower.unreadable == {"control": 1, "decisions": 1, "metrics": 1}
    size = len(encode(records.joined("w0"))) + 1
    assert meter.topics["control"] == TopicCount(records=2, bytes=size, unreadable=1)
    assert meter.positions["metrics", 0] == Position(
        position=bus.end(METRICS), end=bus.end(METRICS)
    )


def test_a_log_without_bad_records_has_none(bus: MemoryBus) -> None:
    append(bus, TOPICS.decisions, round_(0, 0))
    follower = LogFollower(bus, TOPICS, Heard())
    read(follower)
    assert not follower.unreadable
    assert ("metrics", 0) not in follower.meter.positions, "nobody asked for statuses"


def test_of_the_metrics_topic_the_newest_are_read_and_deleted_ones_are_passed_over(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = append(bus, TOPICS.metrics, *(status(at_ns) for at_ns in range(10)))
    monkeypatch.setattr(under_test, "STATUS_TAIL", bus.end(METRICS) - offsets[5])
    monkeypatch.setattr(under_test, "RECORDS_MAX", 1)
    statuses: list[AnyMetrics] = []
    follower = LogFollower(bus, TOPICS, statuses=statuses.append)
    assert follower.advance()
    while bus.trim(METRICS, offsets[8]):
        pass
    read(follower)
    assert [status.at_ns for status in statuses] == [5, 8, 9]


class _Mute(ReaderWrapper):
    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        return []


class _MuteBus(BusWrapper):
    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return _Mute(self.inner.reader(positions))


def test_records_that_never_come_are_given_up_in_bounded_time(bus: MemoryBus) -> None:
    append(bus, TOPICS.decisions, round_(0, 0))
    with pytest.raises(BusError, match=r"timed out reading \S+/0: no record came at offset 0"):
        read(LogFollower(_MuteBus(bus), TOPICS, Heard()))


def test_round_that_folds_facts_which_are_gone_is_told_of(bus: MemoryBus) -> None:
    append(bus, TOPICS.control, records.joined("w0"))
    append(bus, TOPICS.decisions, round_(0, 9))
    with pytest.raises(LogTruncated, match="round 0 folds control up to 9"):
        read(LogFollower(bus, TOPICS, Heard()))
