"""Whatever is appended, wherever it is cut, and however often it is resumed: an archive reads as
the log does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.audit.reading import records_of
from dora_pipe.bus.archive import manifest as manifest_file
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.tiered import TieredBus
from dora_pipe.bus.archive.writer import ArchiveWriter
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.port import Append, Record, TopicPartition, TopicSpec
from tests.support.bus_archive import archive_all, everything, partitions_of


@pytest.fixture(autouse=True, scope="module")
def hasty() -> Iterator[None]:
    """Nothing dies here, so nothing need be durable: syncing would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest_file, "sync", lambda path: None)
        yield


TOPICS = {"a": 1, "b": 2}
ALL = partitions_of(TOPICS)

headers = st.lists(
    st.tuples(
        st.text("abc", max_size=3), st.binary(max_size=9).map(lambda one: one.hex().encode())
    ),
    max_size=3,
).map(tuple)
records = st.builds(
    lambda at, key, value, pairs: Append(
        topic=at.topic, partition=at.partition, key=key, value=value, headers=pairs
    ),
    st.sampled_from(ALL),
    st.binary(max_size=5),
    st.binary(max_size=40),
    headers,
)
appends = st.lists(records, min_size=1, max_size=6)


def _log() -> MemoryBus:
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name=name, partitions=count) for name, count in TOPICS.items()])
    return bus


@settings(max_examples=50)
@given(calls=st.lists(appends, max_size=8), segment_bytes=st.integers(1, 200))
def test_an_archive_reads_as_its_log(calls: list[list[Append]], segment_bytes: int) -> None:
    bus = _log()
    with tempfile.TemporaryDirectory() as place, closing(bus.writer()) as writer:
        for number, call in enumerate(calls):
            writer.append(call)
            if number % 3 == 0:
                archive_all(bus, Path(place), segment_bytes=segment_bytes)
        archive_all(bus, Path(place), segment_bytes=segment_bytes)
        with closing(ArchiveBus(place)) as archive:
            assert everything(archive, ALL) == everything(bus, ALL)
            assert [archive.end(tp) for tp in ALL] == [bus.end(tp) for tp in ALL]


@settings(max_examples=50)
@given(
    calls=st.lists(appends, min_size=1, max_size=5),
    seeks=st.lists(st.tuples(st.sampled_from(ALL), st.floats(0, 1)), max_size=6),
    records_max=st.integers(1, 7),
)
def test_readers_that_jump_see_the_same_in_an_archive(
    calls: list[list[Append]], seeks: list[tuple[TopicPartition, float]], records_max: int
) -> None:
    bus = _log()
    with tempfile.TemporaryDirectory() as place, closing(bus.writer()) as writer:
        for call in calls:
            writer.append(call)
        archive_all(bus, Path(place))
        with closing(ArchiveBus(place)) as archive:
            start = dict.fromkeys(ALL, 0)
            ours, theirs = archive.reader(start), bus.reader(start)
            for tp, share in seeks:
                position = int(bus.end(tp) * share)
                ours.seek(tp, position)
                theirs.seek(tp, position)
                for reader in (ours, theirs):
                    reader.poll(timeout_s=0, records_max=records_max)
                ours.seek(tp, theirs.position(tp))
            for tp in ALL:
                ours.seek(tp, theirs.position(tp))
            seen: list[dict[TopicPartition, list[object]]] = []
            for reader in (ours, theirs):
                found: dict[TopicPartition, list[object]] = {tp: [] for tp in ALL}
                while batch := reader.poll(timeout_s=0, records_max=records_max):
                    for record in batch:
                        found[record.at].append(record)
                seen.append(found)
            assert seen[0] == seen[1]
            assert [ours.position(tp) for tp in ALL] == [bus.end(tp) for tp in ALL]


@settings(max_examples=50)
@given(
    calls=st.lists(appends, min_size=1, max_size=6),
    stops=st.lists(st.integers(0, 12), max_size=4),
    segment_bytes=st.integers(1, 100),
)
def test_a_pass_that_dies_anywhere_costs_nothing(
    calls: list[list[Append]], stops: list[int], segment_bytes: int
) -> None:
    """A writer that is abandoned after any number of segments: nothing is flushed, no lock kept."""
    bus = _log()
    with tempfile.TemporaryDirectory() as place, closing(bus.writer()) as writer:
        for number, call in enumerate(calls):
            writer.append(call)
            if number < len(stops):
                _die(bus, Path(place), segment_bytes, after=stops[number])
        archive_all(bus, Path(place), segment_bytes=segment_bytes)
        with closing(ArchiveBus(place)) as archive:
            assert everything(archive, ALL) == everything(bus, ALL)


class _Dead(Exception):
    pass


def _die(bus: MemoryBus, place: Path, segment_bytes: int, *, after: int) -> None:
    """Some records are read, then the process is gone; of its segments none or all are named."""
    archiver = ArchiveWriter(place, "run", TOPICS, segment_bytes=segment_bytes)
    left = after

    def dying(tp: TopicPartition, end: int) -> Iterator[Record]:
        nonlocal left
        for record in records_of(bus, {tp: end}, start=archiver.position(tp)):
            if left == 0:
                raise _Dead
            left -= 1
            yield record

    try:
        for tp in ALL:
            if bus.end(tp) > archiver.position(tp):
                archiver.seal(tp, dying(tp, bus.end(tp)), bus.end(tp))
    except _Dead:
        pass
    if after % 2:
        archiver._pending.clear()  # what a kill -9 does to what the manifest does not name yet
    archiver.close()


@settings(max_examples=50)
@given(calls=st.lists(appends, min_size=1, max_size=6), share=st.floats(0, 1), later=appends)
def test_an_archive_below_a_log_reads_as_the_log_before_retention(
    calls: list[list[Append]], share: float, later: list[Append]
) -> None:
    bus = _log()
    with tempfile.TemporaryDirectory() as place, closing(bus.writer()) as writer:
        for call in calls:
            writer.append(call)
        archive_all(bus, Path(place))
        writer.append(later)
        whole = everything(bus, ALL)
        for tp in ALL:
            with closing(ArchiveBus(place)) as archive:
                bus.log.delete_before(tp, int(archive.end(tp) * share))
        with closing(TieredBus(ArchiveBus(place), bus)) as both:
            assert {tp: list(records_of(both, {tp: both.end(tp)})) for tp in ALL} == whole
