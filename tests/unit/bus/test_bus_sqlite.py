"""Tests of the SQLite bus: file, locks, disk, waits."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.bus import sqlite, sqlite_file
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.sqlite import SqliteBus, SqliteReader
from dora_pipe.core.errors import BusError, BusFull, LogDamaged, LogTruncated, TopicMissing
from dora_pipe.core.pure.records import Append, TopicPartition

AT = TopicPartition("t", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.sqlite"


@pytest.fixture
def bus(path: Path) -> Iterator[SqliteBus]:
    bus = SqliteBus(path)
    bus.create([TopicSpec(name="t", partitions=2)])
    yield bus
    bus.close()


def texts(*given: str) -> list[Append]:
    return [Append(topic="t", value=text.encode()) for text in given]


def landed(bus: SqliteBus) -> list[str]:
    return [record.value.decode() for record in bus.reader({AT: 0}).poll(timeout_s=0)]


def test_a_missing_file_is_a_log_without_topics_and_stays_missing(path: Path) -> None:
    bus = SqliteBus(path)
    assert bus.topics() == []
    for use in (lambda: bus.partitions("t"), lambda: bus.end(AT), bus.writer):
        with pytest.raises(TopicMissing):
            use()
    bus.close()
    assert not path.exists()


def test_an_empty_file_becomes_a_log_when_topics_are_created(path: Path) -> None:
    path.touch()
    reading, making = SqliteBus(path), SqliteBus(path)
    assert reading.topics() == []
    making.create([TopicSpec(name="t")])
    making.writer().append(texts("a"))
    assert landed(reading) == ["a"]
    making.close()
    reading.close()


def test_a_folder_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BusError) as refused:
        SqliteBus(tmp_path / "nowhere" / "log.sqlite").create([TopicSpec(name="t")])
    assert "nowhere" in refused.value.message and "\n" not in refused.value.message


@pytest.mark.parametrize("create", [False, True])
def test_a_file_of_something_else_is_refused_and_suspended(path: Path, create: bool) -> None:
    path.write_bytes(b"a diary, not a log\n" * 200)
    before = path.read_bytes()
    with pytest.raises(LogDamaged, match="not a log of dora-pipe"):
        SqliteBus(path).create([TopicSpec(name="t")]) if create else SqliteBus(path).topics()
    assert path.read_bytes() == before


def test_another_program_s_database_is_refused_and_suspended(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE diary (entry)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(LogDamaged, match="not a log of dora-pipe"):
        SqliteBus(path).create([TopicSpec(name="t")])
    assert path.read_bytes() == before


def test_a_newer_format_is_refused(bus: SqliteBus, path: Path) -> None:
    bus.close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {sqlite_file.FORMAT + 1}")
    connection.close()
    with pytest.raises(BusError, match="newer"):
        SqliteBus(path).topics()


def test_a_damaged_file_is_one_clear_error(bus: SqliteBus, path: Path) -> None:
    bus.writer().append(texts(*(["x" * 1000] * 200)))
    bus.close()
    damaged = bytearray(path.read_bytes())
    for start in range(4096 * 8, len(damaged), 4096):
        damaged[start : start + 200] = b"\xff" * 200
    path.write_bytes(bytes(damaged))
    again = SqliteBus(path)
    with pytest.raises(BusError, match="damaged") as refused:
        again.reader({AT: 0}).poll(timeout_s=0)
    assert "\n" not in refused.value.message
    again.close()


def test_a_full_disk_refuses_the_whole_call_and_the_writer_goes_on(bus: SqliteBus) -> None:
    writer = bus.writer()
    writer.append(texts("first"))
    connection = writer._file.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    with pytest.raises(BusFull) as refused:
        writer.append(texts("a", "b" * 100_000))
    assert refused.value.hint
    assert landed(bus) == ["first"]
    connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
    writer.append(texts("last"))
    assert landed(bus) == ["first", "last"]


def test_a_lock_held_too_long_is_an_error_and_appends_nothing(
    bus: SqliteBus, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "LOCK_LIMIT_S", 0.02)
    writer = bus.writer()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(BusError, match="locked by another process"):
        writer.append(texts("a"))
    assert landed(bus) == [], "readers are not in the way of a lock"
    other.execute("ROLLBACK")
    other.close()
    writer.append(texts("b"))
    assert landed(bus) == ["b"]


def test_every_commit_waits_for_the_disk(bus: SqliteBus) -> None:
    for part in (bus.writer(), bus.reader({AT: 0})):
        connection = part._file.connection
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,), "2 is FULL"
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_write_ahead_log_does_not_grow_while_a_reader_lives(bus: SqliteBus, path: Path) -> None:
    reader, writer = bus.reader({AT: 0}), bus.writer()
    largest_bytes = 0
    for _ in range(40):
        writer.append([Append(topic="t", value=bytes(100_000))] * 8)
        assert len(reader.poll(timeout_s=0)) == 8
        assert not reader._file.connection.in_transaction
        largest_bytes = max(largest_bytes, path.with_name(path.name + "-wal").stat().st_size)
    assert path.stat().st_size > 24_000_000
    assert largest_bytes < 8_000_000


def test_closing_the_last_connection_leaves_one_file(bus: SqliteBus, path: Path) -> None:
    bus.writer().append(texts("a"))
    bus.reader({AT: 0}).poll(timeout_s=0)
    bus.close()
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    again = SqliteBus(path)
    assert landed(again) == ["a"]
    again.close()


def test_a_finished_log_that_nobody_can_write_is_read_where_it_lies(
    bus: SqliteBus, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus.writer().append(texts("a"))
    bus.close()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    archived = SqliteBus(path)
    assert landed(archived) == ["a"]
    with pytest.raises(BusError, match="readonly"):
        archived.writer().append(texts("b"))
    assert [each.name for each in path.parent.iterdir()] == [path.name], "nothing was put beside it"
    archived.close()


def test_a_person_can_read_the_log_with_sqlite_alone(bus: SqliteBus, path: Path) -> None:
    bus.writer().append([Append(topic="t", partition=1, key=b"k", value=b"v")] * 2)
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT topic, partition, offset, key, value FROM log").fetchall()
    connection.close()
    assert rows == [("t", 1, 0, b"k", b"v"), ("t", 1, 1, b"k", b"v")]


def test_a_partition_never_runs_into_the_next_one(bus: SqliteBus, path: Path) -> None:
    connection = sqlite3.connect(path)
    last = (1 << 52) + (1 << 40) - 3
    connection.execute("INSERT INTO records VALUES (?, x'', NULL, x'')", (last,))
    connection.commit()
    connection.close()
    writer = bus.writer()
    assert writer.append(texts("a")) == [(1 << 40) - 1]
    with pytest.raises(BusFull):
        writer.append(texts("b"))
    assert bus.end(TopicPartition("t", 1)) == 0


def test_more_topics_than_a_row_number_can_hold_are_refused(
    bus: SqliteBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "TOPICS_MAX", 3)
    with pytest.raises(BusError, match="3 topics"):
        bus.create([TopicSpec(name=f"t{i}") for i in range(3)])
    assert bus.topics() == ["t"], "all or none"


def test_an_older_copy_of_the_file_is_a_truncated_log(bus: SqliteBus, path: Path) -> None:
    bus.writer().append(texts("a"))
    reader = bus.reader({AT: 0})
    copy = SqliteBus(path.with_name("copy.sqlite"))
    copy.create([TopicSpec(name="t", partitions=2)])
    reader.poll(timeout_s=0)
    with pytest.raises(LogTruncated, match="t/0"):
        copy.reader({AT: reader.position(AT)}).poll(timeout_s=0)
    copy.close()


class Time:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def waiting(bus: SqliteBus, monkeypatch: pytest.MonkeyPatch) -> tuple[Time, SqliteReader]:
    time = Time()
    monkeypatch.setattr(sqlite, "time", time)
    return time, bus.reader({AT: 0})


def test_a_waiting_reader_sleeps_longer_and_longer_and_never_past_its_deadline(
    waiting: tuple[Time, SqliteReader],
) -> None:
    time, reader = waiting
    began_s = time.now_s
    assert reader.poll(timeout_s=2.0) == []
    assert time.now_s - began_s == pytest.approx(2.0)
    assert time.slept[0] == sqlite.WAIT_S_MIN
    assert max(time.slept) == sqlite.WAIT_S_MAX
    assert time.slept[:-1] == sorted(time.slept[:-1])
    assert len(time.slept) < 75


def test_a_reader_is_late_by_a_quarter_of_the_quiet_time_at_most(
    bus: SqliteBus, waiting: tuple[Time, SqliteReader]
) -> None:
    time, reader = waiting
    writer = bus.writer()
    writer.append(texts("a"))
    reader.poll(timeout_s=0)
    began_s = time.now_s

    def sleep(seconds: float) -> None:
        time.now_s += seconds
        if time.now_s - began_s >= 0.1 and not appended:
            writer.append(texts("b"))
            appended.append(time.now_s)

    appended: list[float] = []
    time.sleep = sleep  # type: ignore[method-assign]
    assert len(reader.poll(timeout_s=9.0)) == 1
    assert time.now_s - began_s <= 0.1 * (1 + 1 / sqlite.WAIT_SHARE) + sqlite.WAIT_S_MIN
