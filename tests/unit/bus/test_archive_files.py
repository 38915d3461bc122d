"""Files of an archive: what is refused, what a disk may do, how much a reader holds."""

from __future__ import annotations

import errno
import hashlib
import json
import tracemalloc
from contextlib import closing
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.audit.reading import records_of
from dora_pipe.bus import open_bus
from dora_pipe.bus.archive import manifest as manifest_file
from dora_pipe.bus.archive.manifest import (
    MANIFEST,
    SEGMENTS,
    Entry,
    decode_manifest,
    file_name,
    load_manifest,
    problems_of,
    read_manifest,
)
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.segment import decode_segment, read_segment
from dora_pipe.bus.archive.tiered import TieredBus
from dora_pipe.bus.archive.writer import ArchiveWriter
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.port import Append, Record, TopicPartition, TopicSpec
from dora_pipe.core.errors import BusError, BusFull, InvariantBroken, LogTruncated, SchemaError
from tests.support.bus_archive import archive_all, everything, partitions_of

AT = TopicPartition("t", 0)


def record(offset: int, value: bytes = b"value") -> Record:
    return Record(topic="t", partition=0, offset=offset, key=b"k", value=value, headers=())


@pytest.fixture
def log() -> MemoryLog:
    return MemoryLog()


@pytest.fixture
def bus(log: MemoryLog) -> MemoryBus:
    made = MemoryBus(log)
    made.create([TopicSpec(name="t")])
    with closing(made.writer()) as writer:
        for number in range(20):
            writer.append([Append(topic="t", value=b"%020d" % number, headers=(("h", b"1"),))])
    return made


@pytest.fixture
def place(bus: MemoryBus, tmp_path: Path) -> Path:
    archive_all(bus, tmp_path / "kept")
    return tmp_path / "kept"


def test_an_archive_is_opened_by_its_address_and_refuses_to_be_written(place: Path) -> None:
    with closing(open_bus(f"archive:{place}")) as kept:
        assert kept.topics() == ["t"]
        for refused in (lambda: kept.create([TopicSpec(name="u")]), lambda: kept.writer()):
            with pytest.raises(BusError, match="cannot be written to") as found:
                refused()
            assert found.value.hint


def interrupted(bus: MemoryBus, place: Path) -> None:
    """Go on with an archive in a pass that dies before its cut, like one that was killed."""
    topics = {topic: bus.partitions(topic) for topic in bus.topics()}
    with closing(ArchiveWriter(place, "run", topics, segment_bytes=64)) as writer:
        for tp in partitions_of(topics):
            start, end = writer.position(tp), bus.end(tp)
            writer.seal(tp, records_of(bus, {tp: end}, start=start), end)


def test_an_archive_whose_first_pass_was_interrupted_is_one_line_that_says_how_to_go_on(
    bus: MemoryBus, tmp_path: Path
) -> None:
    interrupted(bus, tmp_path / "part")
    with pytest.raises(LogTruncated, match="first pass has not ended") as found:
        open_bus(f"archive:{tmp_path / 'part'}")
    assert "goes on where it was" in (found.value.hint or "")
    archive_all(bus, tmp_path / "part")
    open_bus(f"archive:{tmp_path / 'part'}").close()


def test_what_an_interrupted_pass_sealed_and_the_log_lost_is_told_from_what_is_gone(
    log: MemoryLog, bus: MemoryBus, place: Path
) -> None:
    at = TopicPartition("t", 0)
    cut = bus.end(at)
    with closing(bus.writer()) as writer:
        writer.append([Append(topic="t", value=b"late")] * 4)
    interrupted(bus, place)
    log.delete_before(at, cut + 2)
    with pytest.raises(LogTruncated, match="sealed by a pass that has not ended") as found:
        TieredBus(ArchiveBus(place), bus).reader({at: 0})
    assert "goes on where it was" in (found.value.hint or "")


def test_the_chain_is_what_the_documentation_says(place: Path) -> None:
    """Recomputed with the standard library alone."""
    manifest = json.loads((place / MANIFEST).read_text())

    def digest(prefix: str, value: object) -> str:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256((prefix + text).encode()).hexdigest()

    chain = digest("", {name: manifest[name] for name in ("format", "run", "topics")})
    for entry in manifest["entries"]:
        chain = digest(chain, {**entry, "chain": ""})
        assert entry["chain"] == chain
        if entry["file"]:
            data = (place / SEGMENTS / entry["file"]).read_bytes()
            assert hashlib.sha256(data).hexdigest() == entry["sha256"]


def test_a_disk_that_is_full_leaves_the_last_manifest_and_the_next_pass_goes_on(
    bus: MemoryBus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "kept"
    left = 7

    def refuse(path: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest_file, "sync", refuse)
        with pytest.raises(BusFull, match="no room left for the archive"):
            archive_all(bus, place)
    assert read_manifest(place).cut == {"t": (0,)}
    archive_all(bus, place)
    with closing(ArchiveBus(place)) as kept:
        assert everything(kept, [AT]) == everything(bus, [AT])
    assert not list(place.rglob(".tmp-*"))


def test_a_reader_sees_nothing_behind_the_cut(bus: MemoryBus, tmp_path: Path) -> None:
    with closing(ArchiveWriter(tmp_path, "run", {"t": 1}, segment_bytes=1)) as writer:
        writer.seal(AT, [record(0), record(1)], 3)
        writer.cut()
        writer.seal(AT, [record(3)], 5)
        writer.flush()
        with closing(ArchiveBus(tmp_path)) as kept:
            assert kept.end(AT) == 3
            assert [one.offset for one in everything(kept, [AT])[AT]] == [0, 1]
            reader = kept.reader({AT: 3})
            assert reader.poll(timeout_s=0) == []
            writer.cut()
            (late,) = reader.poll(timeout_s=5)
            assert (late.offset, kept.end(AT)) == (3, 5)


def test_a_waiting_reader_meets_a_manifest_that_was_changed(place: Path) -> None:
    with closing(ArchiveBus(place)) as kept:
        reader = kept.reader({AT: kept.end(AT)})
        manifest = load_manifest(place)
        first = msgspec.structs.replace(manifest.entries[0], odd=(0,))
        entries = (first, *manifest.entries[1:])
        manifest_file.write_manifest(place, msgspec.structs.replace(manifest, entries=entries))
        with pytest.raises(InvariantBroken, match="chain"):
            reader.poll(timeout_s=5)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "is no manifest"),
        (b"[]", "is no manifest"),
        (b'{"format": 1}', "missing required field"),
        (b'{"format":9,"run":"r","topics":{},"cut":{}}', "is of format 9"),
        (b'{"format":1,"run":"r","topics":{},"cut":{},"more":1}', "unknown field"),
    ],
)
def test_what_is_no_manifest_is_one_line(data: bytes, match: str) -> None:
    with pytest.raises(SchemaError, match=match) as refused:
        decode_manifest(data)
    message = refused.value.message
    assert "\n" not in message
    assert message.count("(at ") == 1, "the place is said once"


@settings(max_examples=200)
@given(st.data())
def test_no_manifest_that_was_changed_anywhere_passes(data: st.DataObject) -> None:
    entry = Entry(
        topic="t", partition=0, start=0, end=2, records=0, bytes=0, file="", file_bytes=0, sha256=""
    )
    chain = manifest_file.chain_of(manifest_file.genesis("r", {"t": 1}), entry)
    whole = msgspec.json.encode(
        manifest_file.Manifest(
            format=1,
            run="r",
            topics={"t": 1},
            cut={"t": (2,)},
            entries=(msgspec.structs.replace(entry, chain=chain),),
        )
    )
    place = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[place] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_manifest(bytes(changed))
    except SchemaError:
        return
    # Only the cut is not chained: one that is moved down hides records, it changes none.
    lower = msgspec.structs.replace(found, cut={"t": (2,)}) == decode_manifest(whole)
    assert lower or list(problems_of(found))


@settings(max_examples=300)
@given(st.data())
def test_no_segment_that_was_changed_anywhere_is_read_otherwise(data: st.DataObject) -> None:
    """Without the sha256 in front of it: what the decoder alone refuses, or reads alike."""
    raw = _stream([record(3, b"one"), record(5, b"two")])
    changed = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        batches = decode_segment(zstandard.compress(bytes(changed)), _entry(changed))
    except SchemaError:
        return
    assert sum(batch.num_rows for batch in batches) == 2
    assert all(3 <= one < 9 for batch in batches for one in batch.column(0).to_pylist())


def _entry(raw: bytes | bytearray) -> Entry:
    return Entry(
        topic="t",
        partition=0,
        start=3,
        end=9,
        records=2,
        bytes=len(raw),
        file=file_name(AT, 3),
        file_bytes=0,
        sha256="",
    )


def _stream(records: list[Record]) -> bytes:
    from dora_pipe.bus.archive.segment import SCHEMA, _batch

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as stream:
        stream.write_batch(_batch(records))
    return bytes(sink.getvalue().to_pybytes())


def test_what_is_not_of_its_entry_is_refused() -> None:
    raw = _stream([record(3), record(5)])
    packed = zstandard.compress(raw)
    good = _entry(raw)
    assert len(decode_segment(packed, good)) == 1
    for change, match in [
        ({"records": 3}, "2 records instead of 3"),
        ({"end": 5}, "offsets"),
        ({"start": 4}, "offsets"),
        ({"bytes": len(raw) - 1}, "more than"),
        ({"bytes": len(raw) + 1}, "instead of"),
    ]:
        with pytest.raises(SchemaError, match=match):
            decode_segment(packed, msgspec.structs.replace(good, **change))
    double = _stream([record(5), record(5)])
    with pytest.raises(SchemaError, match="offsets"):
        decode_segment(zstandard.compress(double), _entry(double))
    with pytest.raises(SchemaError, match="zstd"):
        decode_segment(raw, good)


def test_a_frame_that_unpacks_to_more_than_its_entry_says_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 28))
    entry = msgspec.structs.replace(_entry(b""), bytes=1000)
    tracemalloc.start()
    try:
        with pytest.raises(SchemaError):
            decode_segment(bomb, entry)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_segment_that_is_gone_or_other_is_named(place: Path) -> None:
    entry = next(one for one in load_manifest(place).entries if one.records)
    path = place / SEGMENTS / entry.file
    assert read_segment(path, entry).batch_from(0)
    data = path.read_bytes()
    path.write_bytes(data + b"x")
    with pytest.raises(InvariantBroken, match=r"was changed \(sha256\)"):
        read_segment(path, entry)
    path.unlink()
    with pytest.raises(LogTruncated, match="is gone"):
        read_segment(path, entry)


def test_a_large_log_is_archived_and_read_with_little_memory(tmp_path: Path) -> None:
    """64 MB pass through; writing holds a batch, reading a segment."""
    value = bytes(range(256)) * 256

    def records() -> object:
        for offset in range(1000):
            yield record(offset, value)

    segment_bytes = 4 << 20
    tracemalloc.start()
    try:
        with closing(
            ArchiveWriter(tmp_path, "run", {"t": 1}, segment_bytes=segment_bytes)
        ) as writer:
            writer.seal(AT, records(), 1000)  # type: ignore[arg-type]
            writer.cut()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
        with closing(ArchiveBus(tmp_path)) as kept:
            reader, seen = kept.reader({AT: 0}), 0
            while found := reader.poll(timeout_s=0, bytes_max=1 << 20):
                seen += len(found)
        assert seen == 1000
        assert tracemalloc.get_traced_memory()[1] < 6 * segment_bytes
    finally:
        tracemalloc.stop()
