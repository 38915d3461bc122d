"""Copies of topics between logs of all kinds: same records, same offsets, one digest."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest

from dora_pipe.bus.base import records_of
from dora_pipe.bus.blobs import BlobBus, BlobFiles
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.copy import CopyTarget, FileTarget, FillingTarget, LogCopy, copy_topics
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusError, InvariantBroken, LogTruncated
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from tests.support.bus_harness import KafkaHarness, MemoryHarness, SqliteHarness
from tests.support.bus_steps import Harness

KAFKA = pytest.mark.kafka
PAIRS = [
    ("memory", "sqlite"),
    ("sqlite", "sqlite"),
    pytest.param(("kafka", "sqlite"), marks=KAFKA),
    pytest.param(("memory", "kafka"), marks=KAFKA),
    pytest.param(("sqlite", "kafka"), marks=KAFKA),
]


class Pair:
    def __init__(self, source: Harness, target: CopyTarget, prefix: str) -> None:
        self.harness, self.target = source, target
        self.source = source.open()
        self.topics = [f"{prefix}.control", f"{prefix}.trajectories"]
        self.specs = [
            TopicSpec(name=self.topics[0]),
            TopicSpec(name=self.topics[1], partitions=2, max_record_bytes=2_000_000),
        ]
        self.source.create(self.specs)
        self.target.bus.create(self.specs)

    def write(self, appends: int, start: int = 0) -> None:
        name = f"{self.topics[0]}.writer"
        with closing(self.source.writer(exclusive=name)) as writer:
            for number in range(start, start + appends):
                text = f"record {number}".encode()
                writer.append(
                    [
                        Append(topic=self.topics[0], value=text, headers=(("kind", b"x"),)),
                        Append(
                            topic=self.topics[1],
                            partition=number % 2,
                            key=b"%d" % number,
                            value=text * 3,
                        ),
                    ]
                )
        # Kafka shows readers a committed transaction a moment later; its next writer waits for it.
        self.source.writer(exclusive=name).close()

    def copy(self, target: CopyTarget | None = None, source: Bus | None = None) -> LogCopy:
        return copy_topics(
            source or self.source, target or self.target, self.topics, lambda *args: None
        )


def content(bus: Bus, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, list[Record]]]:
    places = [
        TopicPartition(topic, part) for topic in topics for part in range(bus.partitions(topic))
    ]
    return {
        tp: (bus.end(tp), list(records_of(bus, {tp: bus.end(tp)}, start=bus.begin(tp))))
        for tp in places
    }


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    kinds: tuple[str, str] = getattr(request, "param", ("memory", "sqlite"))
    source, copied = [_harness(kind, tmp_path / str(i), request) for i, kind in enumerate(kinds)]
    bus = copied.open()
    target = FileTarget(bus) if isinstance(bus, SqliteBus) else FillingTarget(bus)
    yield Pair(source, target, f"run{uuid4().hex[:8]}")
    source.close()
    copied.close()


def _harness(
    kind: str, folder: Path, request: pytest.FixtureRequest
) -> MemoryHarness | SqliteHarness | KafkaHarness:
    folder.mkdir()
    if kind == "memory":
        return MemoryHarness()
    if kind == "sqlite":
        return SqliteHarness(folder)
    return KafkaHarness(request.getfixturevalue("kafka_broker").bootstrap)


every_pair = pytest.mark.parametrize("pair", PAIRS, indirect=True)


@every_pair
def test_copy_has_the_records_offsets_and_ends_of_its_source(pair: Pair) -> None:
    pair.write(30)
    done = pair.copy()
    assert (done.records, done.added) == (60, 60)
    assert content(pair.target.bus, pair.topics) == content(pair.source, pair.topics)
    again = pair.copy()
    assert (again.added, again.digest) == (0, done.digest)


@every_pair
def test_copy_of_a_run_that_goes_on_continues(pair: Pair) -> None:
    pair.write(5)
    first = pair.copy()
    pair.write(5, start=5)
    second = pair.copy()
    assert (second.records, second.added) == (20, 10)
    assert second.digest != first.digest
    assert content(pair.target.bus, pair.topics) == content(pair.source, pair.topics)


class Killed(Exception):
    """The copying process has died."""


class DyingTarget:
    def __init__(self, target: CopyTarget, calls: int) -> None:
        self.bus, self.position = target.bus, target.position
        self._target, self._left = target, calls

    def place(self, tp: TopicPartition, records: Sequence[Record], *, begin: int, end: int) -> None:
        self._left -= 1
        if self._left:
            self._target.place(tp, records, begin=begin, end=end)
            return
        if isinstance(self._target, FillingTarget) and len(records) > 1:  # Kafka takes a prefix
            half = records[: len(records) // 2]
            self._target.place(tp, half, begin=begin, end=half[-1].offset + 1)
        raise Killed


@every_pair
@pytest.mark.parametrize("calls", [1, 2, 4])
def test_killed_copy_continues_after_its_last_record(pair: Pair, calls: int) -> None:
    pair.write(30)
    with pytest.raises(Killed):
        pair.copy(DyingTarget(pair.target, calls))
    done = pair.copy()
    assert done.records == 60
    assert content(pair.target.bus, pair.topics) == content(pair.source, pair.topics)


@pytest.mark.parametrize("pair", [("sqlite", "sqlite")], indirect=True)
@pytest.mark.parametrize("side", ["source", "copy"])
@pytest.mark.parametrize("column", ["key", "value", "headers"])
def test_flipped_byte_is_found(pair: Pair, side: str, column: str) -> None:
    pair.write(10)
    pair.copy()
    bus = pair.source if side == "source" else pair.target.bus
    assert isinstance(bus, SqliteBus)
    topic = pair.topics[0] if column == "headers" else pair.topics[1]
    with closing(sqlite3.connect(bus.path)) as file, file:
        (index, old) = file.execute(
            f"SELECT at, {column} FROM log WHERE topic = ? ORDER BY at DESC LIMIT 1", (topic,)
        ).fetchone()
        new = old[:-1] + bytes([old[-1] ^ 1])
        file.execute(f"UPDATE records SET {column} = ? WHERE at = ?", (new, index))
    with pytest.raises(InvariantBroken, match=r"trajectories/1 differs|control/0 differs"):
        pair.copy()


@every_pair
def test_log_of_another_run_is_refused_and_stays_as_it_is(pair: Pair) -> None:
    pair.write(10)
    writer = pair.target.bus.writer()
    writer.append([Append(topic=pair.topics[0], value=b"another run")])
    before = content(pair.target.bus, pair.topics)
    with pytest.raises(BusError, match="is not a copy of this run"):
        pair.copy()
    assert content(pair.target.bus, pair.topics) == before


def test_copy_that_went_on_by_itself_is_refused(pair: Pair) -> None:
    pair.write(3)
    pair.copy()
    pair.target.bus.writer().append([Append(topic=pair.topics[0], value=b"its own")])
    with pytest.raises(BusError, match="ends at"):
        pair.copy()
    pair.write(5, start=3)
    with pytest.raises(InvariantBroken, match="is not a copy of this run"):
        pair.copy()


@every_pair
def test_large_values_are_in_the_copy(pair: Pair, tmp_path: Path) -> None:
    def whole(bus: Bus, folder: str) -> Bus:
        return BlobBus(bus, BlobFiles(tmp_path / folder), above_bytes=100)

    pair.source = whole(pair.source, "blobs")
    pair.write(3)
    large = Append(topic=pair.topics[1], value=bytes(range(256)) * 400)
    with closing(pair.source.writer()) as writer:
        writer.append([large])
    assert len(list((tmp_path / "blobs").iterdir())) == 1
    target = pair.target
    if isinstance(target, FillingTarget):  # Kafka's copy has a store of its own
        target = FillingTarget(whole(target.bus, "copied"))
    pair.copy(target)
    (tmp_path / "blobs").rename(tmp_path / "gone")
    _, records = content(target.bus, pair.topics)[TopicPartition(pair.topics[1], 0)]
    assert records[-1].value == large.value


def test_lost_large_value_is_refused_unless_allowed(pair: Pair, tmp_path: Path) -> None:
    files = BlobFiles(tmp_path / "blobs")
    pair.source = BlobBus(pair.source, files, above_bytes=0)
    with closing(pair.source.writer()) as writer:
        writer.append([Append(topic=pair.topics[1], value=b"large")])
    (tmp_path / "blobs").rename(tmp_path / "gone")
    with pytest.raises(BusError, match="the store has no such value"):
        pair.copy()
    done = copy_topics(pair.source, pair.target, pair.topics, lambda *args: None, allow_lost=True)
    assert done.lost == 1


def test_deleted_beginning_stays_deleted(pair: Pair) -> None:
    pair.write(10)
    assert isinstance(pair.source, MemoryBus)
    tp = TopicPartition(pair.topics[0], 0)
    pair.source.log.delete_before(tp, 7)
    begin = pair.source.begin(tp)
    pair.copy()
    copied = pair.target.bus
    assert copied.begin(tp) == begin > 0
    assert content(copied, pair.topics) == content(pair.source, pair.topics)
    with pytest.raises(LogTruncated), closing(copied.reader({tp: 0})) as reader:
        reader.poll(timeout_s=0.0)
    assert pair.copy().added == 0


@pytest.mark.parametrize("pair", [pytest.param(("memory", "kafka"), marks=KAFKA)], indirect=True)
def test_deleted_beginning_is_not_hidden_on_kafka(pair: Pair) -> None:
    pair.write(10)
    assert isinstance(pair.source, MemoryBus)
    pair.source.log.delete_before(TopicPartition(pair.topics[0], 0), 7)
    with pytest.raises(LogTruncated, match=r"begins at 7"):
        pair.copy()


@every_pair
def test_metrics_that_were_trimmed_are_copied_from_where_they_begin(pair: Pair) -> None:
    topic = f"{pair.topics[0].removesuffix('.control')}.metrics"
    tp = TopicPartition(topic, 0)
    for bus in (pair.source, pair.target.bus):
        bus.create([TopicSpec(name=topic)])
    pair.topics = [topic]
    with closing(pair.source.writer()) as writer:
        for number in range(10):
            writer.append([Append(topic=topic, value=b"%d" % number)])
    pair.copy()
    while pair.source.trim(tp, 6):
        pass
    with closing(pair.source.writer()) as writer:
        writer.append([Append(topic=topic, value=b"10")])
    done = pair.copy()
    assert done.added == 1
    (_, copied), (_, kept) = (content(bus, [topic])[tp] for bus in (pair.target.bus, pair.source))
    assert copied[-len(kept) :] == kept and len(copied) == 11


def test_copy_can_be_appended_to(pair: Pair) -> None:
    pair.write(4)
    pair.copy()
    tp = TopicPartition(pair.topics[0], 0)
    end = pair.source.end(tp)
    with closing(pair.target.bus.writer()) as writer:
        assert writer.append([Append(topic=tp.topic, value=b"next")]) == [end]
