"""Tests of blobs: values too large for the log."""

from __future__ import annotations

import logging
from hashlib import sha256
from pathlib import Path

import pytest

from dora_pipe.bus import open_bus
from dora_pipe.bus.blobs import (
    BLOB,
    BLOB_BYTES,
    BLOB_LOST,
    BlobBus,
    BlobFiles,
    blob_bytes,
    lost_blob,
    may_be_blob,
)
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.logged import record_digest
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusFull, RecordTooLarge
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.schemas.wire import digest_as
from tests.support.bus_steps import catch_up, values

TOPIC = "r.trajectories"
AT = TopicPartition(TOPIC, 0)
LIMIT_BYTES = 1000
LARGE = bytes(range(256)) * 10
DIGEST = sha256(LARGE).hexdigest()
HEADERS = (("run", b"r"), ("claimant", b"x"))


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def bus(log: MemoryLog, tmp_path: Path) -> BlobBus:
    bus = BlobBus(MemoryBus(log), BlobFiles(tmp_path / "blobs"))
    bus.create(
        [TopicSpec(name=name, max_record_bytes=LIMIT_BYTES) for name in (TOPIC, "r.control")]
    )
    return bus


def large(value: bytes = LARGE) -> Append:
    return Append(topic=TOPIC, key=b"g1", value=value, headers=HEADERS)


def read(bus: Bus) -> list[Record]:
    return catch_up(bus, bus.reader({AT: 0}), AT)


def raw(log: MemoryLog) -> list[Record]:
    return read(MemoryBus(log))


def test_a_value_above_the_limit_lies_beside_the_log_and_comes_back(
    bus: BlobBus, log: MemoryLog, tmp_path: Path
) -> None:
    small = Append(topic=TOPIC, value=b"small")
    offsets = bus.writer().append([small, large(), small])
    assert [record.value for record in read(bus)] == [b"small", LARGE, b"small"]
    record = read(bus)[1]
    assert (record.offset, record.key, record.headers) == (offsets[1], b"g1", HEADERS)
    stored = raw(log)[1]
    assert stored.value == b"" and stored.headers == (
        *HEADERS,
        (BLOB, DIGEST.encode()),
        (BLOB_BYTES, b"2560"),
    )
    assert blob_bytes(stored) == 2560
    assert (tmp_path / "blobs" / DIGEST).read_bytes() == LARGE
    stored_names = [path.name for path in (tmp_path / "blobs").iterdir()]
    assert stored_names == [DIGEST], "no temporary file stays"


def test_a_value_is_claimed_under_the_digest_that_its_maker_computed_and_checked_by_the_reader(
    bus: BlobBus, log: MemoryLog
) -> None:
    named = digest_as("blake3-", LARGE)
    headers = (("sha256", named.encode()),)
    bus.writer().append([Append(topic=TOPIC, value=LARGE, headers=headers, digest=named)])
    assert dict(raw(log)[0].headers)[BLOB].decode() == named
    record = read(bus)[0]
    assert (record.value, record.checked) == (LARGE, named)
    assert record_digest(record) == named


def test_a_value_whose_headers_name_another_digest_comes_back_and_is_not_taken_for_it(
    bus: BlobBus,
) -> None:
    wrong = digest_as("blake3-", b"another")
    bus.writer().append([Append(topic=TOPIC, value=LARGE, headers=(("sha256", wrong.encode()),))])
    record = read(bus)[0]
    assert record.value == LARGE
    assert record_digest(record) == digest_as(wrong, LARGE) != wrong


def test_a_writers_own_bound_claims_what_the_topic_would_take(
    log: MemoryLog, tmp_path: Path
) -> None:
    bus = BlobBus(MemoryBus(log), BlobFiles(tmp_path, synced=False), above_bytes=100)
    bus.create([TopicSpec(name=TOPIC)])
    bus.writer().append([large(bytes(100)), large(bytes(101))])
    assert [blob_bytes(record) for record in raw(log)] == [0, 101]
    assert [record.value for record in read(bus)] == [bytes(100), bytes(101)]


def test_a_limit_is_learnt_once_and_what_fits_stays_in_the_log(
    bus: BlobBus, log: MemoryLog
) -> None:
    writer = bus.writer()
    for _ in range(3):
        writer.append([large(), large(bytes(LIMIT_BYTES - 30))])
    assert [len(record.value) for record in raw(log)] == [0, LIMIT_BYTES - 30] * 3


def test_a_limit_that_was_lowered_is_learnt_anew(bus: BlobBus, log: MemoryLog) -> None:
    writer = bus.writer()
    writer.append([large(), large(bytes(700))])
    log._topics[TOPIC] = TopicSpec(name=TOPIC, max_record_bytes=500)
    writer.append([large(bytes(700))])
    assert [len(record.value) for record in raw(log)] == [0, 700, 0]


def test_only_topics_of_large_values_are_claimed(bus: BlobBus) -> None:
    assert [may_be_blob(f"r.{name}") for name in ("trajectories", "progress")] == [True, True]
    assert not any(may_be_blob(f"r.{name}") for name in ("control", "decisions", "metrics"))
    with pytest.raises(RecordTooLarge, match="control"):
        bus.writer().append([large(), Append(topic="r.control", value=LARGE)])
    assert read(bus) == [], "nothing of the call was appended"


def test_a_key_that_alone_is_too_large_is_refused(bus: BlobBus) -> None:
    with pytest.raises(RecordTooLarge):
        bus.writer().append([Append(topic=TOPIC, key=LARGE, value=LARGE)])


def test_a_value_beyond_every_bound_is_refused_and_not_stored(
    log: MemoryLog, bus: BlobBus, tmp_path: Path
) -> None:
    narrow = BlobBus(MemoryBus(log), BlobFiles(tmp_path / "blobs"), bytes_max=len(LARGE) - 1)
    with pytest.raises(RecordTooLarge, match="outside the log"):
        narrow.writer().append([large()])
    assert not (tmp_path / "blobs").exists()


def damaged(path: Path, how: str) -> None:
    match how:
        case "gone":
            path.unlink()
        case "other":
            path.write_bytes(LARGE[::-1])
        case "short":
            path.write_bytes(LARGE[:-1])


@pytest.mark.parametrize(
    ("how", "why"),
    [("gone", "no such value"), ("short", "no such value"), ("other", "another digest")],
)
def test_a_lost_value_makes_its_record_unreadable_and_named(
    bus: BlobBus, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, why: str
) -> None:
    bus.writer().append([large(), Append(topic=TOPIC, value=b"next")])
    damaged(tmp_path / "blobs" / DIGEST, how)
    with caplog.at_level(logging.WARNING):
        lost, after = read(bus)
    assert (lost.value, after.value) == (b"", b"next"), "the partition goes on"
    assert DIGEST in lost_blob(lost) and why in lost_blob(lost)
    assert lost_blob(after) == ""
    assert f"{TOPIC}/0@{lost.offset}" in caplog.text and DIGEST in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        ((BLOB, b"../../etc/passwd"), (BLOB_BYTES, b"10")),
        ((BLOB, DIGEST.encode()), (BLOB_BYTES, b"-1")),
        ((BLOB, DIGEST.encode()), (BLOB_BYTES, b"9" * 40)),
        ((BLOB, DIGEST.encode()),),
        ((BLOB, DIGEST.upper().encode()), (BLOB_BYTES, b"2560")),
    ],
)
def test_a_malformed_claim_is_no_claim_and_opens_no_file(
    bus: BlobBus, log: MemoryLog, headers: tuple[tuple[str, bytes], ...]
) -> None:
    MemoryBus(log).writer().append([Append(topic=TOPIC, value=b"", headers=headers)])
    assert [(record.value, record.headers) for record in read(bus)] == [(b"", headers)]


def test_a_forged_size_is_refused_before_anything_is_read(bus: BlobBus, log: MemoryLog) -> None:
    forged = ((BLOB, DIGEST.encode()), (BLOB_BYTES, b"999999999999"))
    MemoryBus(log).writer().append([Append(topic=TOPIC, value=b"", headers=forged)])
    assert "exceed the limit" in lost_blob(read(bus)[0])


def test_a_record_that_has_a_value_is_no_claim_whatever_its_headers_say(
    bus: BlobBus, log: MemoryLog
) -> None:
    headers = ((BLOB, DIGEST.encode()), (BLOB_BYTES, b"2560"))
    MemoryBus(log).writer().append([Append(topic=TOPIC, value=b"v", headers=headers)])
    assert (read(bus)[0].value, read(bus)[0].headers) == (b"v", headers)


def test_a_value_that_came_back_leaves_no_trace_of_having_been_lost(
    bus: BlobBus, log: MemoryLog, tmp_path: Path
) -> None:
    BlobFiles(tmp_path / "blobs").write(DIGEST, LARGE)
    headers = (
        *HEADERS,
        (BLOB, DIGEST.encode()),
        (BLOB_BYTES, b"2560"),
        (BLOB_LOST, b"the store has no such value"),
    )
    MemoryBus(log).writer().append([Append(topic=TOPIC, value=b"", headers=headers)])
    assert (read(bus)[0].value, read(bus)[0].headers) == (LARGE, HEADERS)


def test_polls_are_bounded_by_the_size_of_what_is_claimed(bus: BlobBus) -> None:
    bus.writer().append([large(), large(), large()])
    reader = bus.reader({AT: 0})
    for _ in range(3):
        before = reader.position(AT)
        (record,) = reader.poll(timeout_s=0, bytes_max=2000)
        assert record.offset == before and record.value == LARGE
        assert reader.position(AT) > record.offset
    assert reader.poll(timeout_s=0) == []
    assert reader.position(AT) == bus.end(AT)


class FailingFiles(BlobFiles):
    def write(self, digest: str, value: bytes) -> None:
        raise BusFull("no room")


def test_a_value_that_cannot_be_kept_is_not_appended(
    bus: BlobBus, log: MemoryLog, tmp_path: Path
) -> None:
    failing = BlobBus(MemoryBus(log), FailingFiles(tmp_path))
    with pytest.raises(BusFull):
        failing.writer().append([large()])
    assert raw(log) == []


def test_a_folder_that_may_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "blobs").write_text("a file is in the way")
    with pytest.raises(BusFull, match="blobs") as refused:
        BlobFiles(tmp_path / "blobs").write(DIGEST, LARGE)
    assert refused.value.hint


def test_two_writers_of_one_value_do_not_disturb_each_other(tmp_path: Path) -> None:
    files = BlobFiles(tmp_path)
    for _ in range(2):
        files.write(DIGEST, LARGE)
    damaged(tmp_path / DIGEST, "short")
    files.write(DIGEST, LARGE)
    assert files.read(DIGEST, len(LARGE)) == LARGE, "a torn file is written again"


def test_the_log_of_a_file_claims_by_its_address(tmp_path: Path) -> None:
    url, blobs = f"sqlite:{tmp_path / 'log'}", BlobFiles(tmp_path / "blobs")
    bus = open_bus(url, blobs=blobs)
    bus.create([TopicSpec(name=TOPIC, max_record_bytes=LIMIT_BYTES)])
    bus.writer().append([large()])
    assert values(read(bus)) == [LARGE]
    bus.close()
    again = open_bus(url, blobs=blobs)
    assert values(read(again)) == [LARGE]
    again.close()
    bare = SqliteBus(tmp_path / "log")
    assert values(read(bare)) == [b""]
    bare.close()
