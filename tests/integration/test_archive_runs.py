"""Archives of whole runs: audited as their logs are, taken while a run goes on, damaged, forged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_pipe.audit.archive import Archiver, Pass, verify
from dora_pipe.audit.auditor import audit
from dora_pipe.audit.reading import records_of
from dora_pipe.audit.report import AuditReport
from dora_pipe.bus.archive.manifest import (
    MANIFEST,
    SEGMENTS,
    Entry,
    Manifest,
    chain_of,
    genesis,
    load_manifest,
    read_manifest,
    write_manifest,
)
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.segment import Segment, write_segment
from dora_pipe.bus.memory import AppendFault, MemoryBus, ScriptedFaults
from dora_pipe.bus.port import Append, Record, TopicPartition
from dora_pipe.core.errors import DoraError, InvariantBroken, LogTruncated
from tests.integration.test_audit_living import BusyBus
from tests.support.cluster import Cluster, make_config
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper

SEGMENT_BYTES = 20_000
"""So small that the run has many."""


@pytest.fixture
def place(recorded: RecordedRun, tmp_path: Path) -> Path:
    archive(recorded, tmp_path / "kept")
    return tmp_path / "kept"


def archive(run: RecordedRun, place: Path) -> Pass:
    with (
        closing(run.open()) as bus,
        closing(Archiver(bus, run.topics, place, segment_bytes=SEGMENT_BYTES)) as archiver,
    ):
        return archiver.once()


def audited(run: RecordedRun, place: Path) -> AuditReport:
    with closing(ArchiveBus(place)) as bus:
        return audit(bus, run.topics, run.store)


def forge(place: Path, change: Callable[[Record], Record], topic: str) -> None:
    """Change the records of a topic (named without its run), and every digest of the archive."""
    manifest = read_manifest(place)
    entries: list[Entry] = []
    chain = genesis(manifest.run, manifest.topics)
    with closing(ArchiveBus(place)) as bus:
        for entry in manifest.entries:
            if entry.records and entry.topic.endswith(f".{topic}"):
                segment = bus.segment(entry)
                records = [change(one) for one in _records(segment)]
                written = write_segment(place / SEGMENTS / entry.file, records)
                entry = msgspec.structs.replace(
                    entry, bytes=written.bytes, file_bytes=written.file_bytes, sha256=written.sha256
                )
            chain = chain_of(chain, entry)
            entries.append(msgspec.structs.replace(entry, chain=chain))
    write_manifest(place, msgspec.structs.replace(manifest, entries=tuple(entries)))


def _records(segment: Segment) -> Iterator[Record]:
    position = 0
    while found := segment.batch_from(position):
        yield from found
        position = found[-1].offset + 1


def test_audit_of_an_archive_says_what_audit_of_the_log_says(
    recorded: RecordedRun, place: Path
) -> None:
    with closing(recorded.open()) as bus:
        of_the_log = audit(bus, recorded.topics, recorded.store)
    assert of_the_log.holds
    assert audited(recorded, place) == of_the_log
    found = verify(place)
    assert (found.problems, found.notes) == ([], [])
    assert found.segments > 10
    assert found.head == load_manifest(place).head


def test_a_second_pass_over_a_finished_run_adds_nothing(recorded: RecordedRun, place: Path) -> None:
    before = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    again = archive(recorded, place)
    assert (again.segments, again.records, again.notes) == (0, 0, [])
    after = {path: path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}
    assert after == before


@pytest.mark.parametrize("turns", [3, 11])
def test_every_cut_of_a_living_run_is_one_that_audit_accepts(tmp_path: Path, turns: int) -> None:
    with Cluster(tmp_path, make_config(run__steps=8), on_disk=False) as cluster:
        bus = BusyBus(cluster, turns)
        place, passes = tmp_path / "kept", 0
        while cluster.roles:
            cluster.ticks(31)
            with closing(Archiver(bus, cluster.topics, place, segment_bytes=4_000)) as archiver:
                archiver.once()
            with closing(ArchiveBus(place)) as kept:
                report = audit(kept, cluster.topics, cluster.store.root)
            assert [one.line for one in report.violations] == [], f"pass {passes}"
            passes += 1
        with closing(Archiver(cluster.bus, cluster.topics, place)) as archiver:
            archiver.once()
            assert archiver.finished
        with closing(ArchiveBus(place)) as kept:
            final = audit(kept, cluster.topics, cluster.store.root)
            assert final == audit(cluster.bus, cluster.topics, cluster.store.root)
    assert final.finished and final.steps == 8 and passes >= 2


def test_a_run_that_is_over_is_not_archived_to_its_end_while_records_of_it_are_held_back(
    tmp_path: Path,
) -> None:
    now_ms = [10**9]  # long after the run
    with Cluster(tmp_path, make_config(), on_disk=False) as cluster:
        cluster.run()
        late = ScriptedFaults(appends={0: AppendFault(kind="delayed", delay_ms=1)})
        log, topic = cluster._log, cluster.topics.metrics
        writer = MemoryBus(log, faults=late, now_ms=lambda: now_ms[0]).writer()
        writer.append([Append(topic=topic, value=b"late")])
        bus = MemoryBus(log, now_ms=lambda: now_ms[0])
        with closing(Archiver(bus, cluster.topics, tmp_path / "kept")) as archiver:
            (note,) = archiver.once().notes
            assert note.startswith(f"{topic}/0: its last records cannot be read yet")
            assert not archiver.finished
            now_ms[0] += 1
            assert archiver.once().notes == []
            assert archiver.finished


def _segment(place: Path, topic: str) -> Path:
    return sorted((place / SEGMENTS).glob(f"recorded.{topic}-*"))[-1]


def _flip(place: Path) -> str:
    path = _segment(place, "trajectories")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return f"segment {path.name} of the archive was changed (sha256)"


def _remove(place: Path) -> str:
    path = _segment(place, "control")
    path.unlink()
    return f"segment {path.name} of the archive is gone: No such file or directory"


def _shorten(place: Path) -> str:
    path = _segment(place, "decisions")
    path.write_bytes(path.read_bytes()[:-1])
    return f"segment {path.name} of the archive was changed (sha256)"


def _edit(place: Path, change: Callable[[Manifest], Manifest]) -> None:
    write_manifest(place, change(load_manifest(place)))


def _broken_at(entry: Entry) -> str:
    name = entry.name
    return f"{MANIFEST}: the entry of {name}, or one before it, was changed or taken out (chain)"


def _change_an_entry(place: Path) -> str:
    entries = list(load_manifest(place).entries)
    entries[3] = msgspec.structs.replace(entries[3], records=entries[3].records + 1)
    _edit(place, lambda one: msgspec.structs.replace(one, entries=tuple(entries)))
    return _broken_at(entries[3])


def _take_an_entry_out(place: Path) -> str:
    entries = load_manifest(place).entries
    kept = (*entries[:3], *entries[4:])
    _edit(place, lambda one: msgspec.structs.replace(one, entries=kept))
    return _broken_at(entries[4])


def _rename_the_run(place: Path) -> str:
    _edit(place, lambda one: msgspec.structs.replace(one, run="another"))
    return _broken_at(load_manifest(place).entries[0])


def _cut_beyond(place: Path) -> str:
    far = 1 << 30
    _edit(
        place, lambda one: msgspec.structs.replace(one, cut={**one.cut, "recorded.control": (far,)})
    )
    end = [one.end for one in load_manifest(place).entries if one.topic == "recorded.control"][-1]
    return f"{MANIFEST}: recorded.control/0 is cut at {far}, its segments end at {end}"


DAMAGES = [
    _flip,
    _remove,
    _shorten,
    _change_an_entry,
    _take_an_entry_out,
    _rename_the_run,
    _cut_beyond,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_each_damage_is_named_in_one_line(
    recorded: RecordedRun, place: Path, damage: Callable[[Path], str]
) -> None:
    line = damage(place)
    assert verify(place).problems[0] == line
    with pytest.raises((InvariantBroken, LogTruncated)) as refused:
        audited(recorded, place)
    assert str(refused.value).endswith(line)
    assert "\n" not in refused.value.message


def test_a_manifest_that_is_cut_or_gone_is_one_line(recorded: RecordedRun, place: Path) -> None:
    data = (place / MANIFEST).read_bytes()
    (place / MANIFEST).write_bytes(data[: len(data) // 2])
    with pytest.raises(DoraError, match="is no manifest"):
        audited(recorded, place)
    (place / MANIFEST).unlink()
    with pytest.raises(LogTruncated, match=r"no archive: there is no manifest\.json"):
        audited(recorded, place)


def test_a_head_that_was_written_down_tells_an_archive_that_was_rewritten(
    recorded: RecordedRun, place: Path
) -> None:
    head = load_manifest(place).head
    early = load_manifest(place).entries[2].chain
    assert verify(place, expected=head).problems == []
    assert verify(place, expected=early).problems == []
    forge(place, lambda record: replace(record, key=record.key + b"x"), "metrics")
    assert verify(place).problems == []
    assert "never had the value" in verify(place, expected=head).problems[0]


def test_a_forger_who_mends_the_chain_is_found_by_audit(recorded: RecordedRun, place: Path) -> None:
    """A record is changed, its segment, its entry and every chain behind it are made to fit."""
    with closing(ArchiveBus(place)) as bus:
        control = TopicPartition(recorded.topics.control, 0)
        target = next(
            one.offset
            for one in records_of(bus, {control: bus.end(control)})
            if b"trajectories-logged" in one.value
        )
    forge(
        place,
        lambda record: (
            replace(record, value=record.value.replace(b'"tokens":', b'"tokens":1'))
            if record.offset == target
            else record
        ),
        "control",
    )
    assert verify(place).problems == []
    report = audited(recorded, place)
    assert any("chain" in one.line for one in report.violations)


def test_a_forged_trajectory_in_a_mended_archive_is_found_by_audit(
    recorded: RecordedRun, place: Path, tmp_path: Path
) -> None:
    """Its headers fit its new bytes; the facts and the commit name the old ones."""
    with Tamper(recorded.copy(tmp_path / "copy")) as log:
        row, fact = log.trained()
        new = log.reencode(row, lambda one: replace(one, reward=0.125))
    forge(
        place,
        lambda record: (
            replace(record, value=new.value, headers=new.headers)
            if (record.partition, record.offset) == (row.partition, row.offset)
            else record
        ),
        "trajectories",
    )
    assert verify(place).problems == []
    report = audited(recorded, place)
    assert any(fact.trajectory in one.line and "sha256" in one.line for one in report.violations)


def test_bytes_that_the_log_itself_has_wrong_are_archived_as_they_are_and_said(
    copy: RecordedRun, recorded: RecordedRun, tmp_path: Path
) -> None:
    with Tamper(copy) as log:
        row, _ = log.trained()
        log.put(replace(row, value=row.value[:-1] + bytes([row.value[-1] ^ 1])))
    done = archive(copy, tmp_path / "kept")
    where = f"recorded.trajectories/{row.partition}@{row.offset}"
    line = f"{where}: its bytes are not those that its headers name"
    assert done.notes == [f"{line} (sha256)"]
    found = verify(tmp_path / "kept")
    assert (found.problems, found.notes) == ([], [line])
    with closing(copy.open()) as bus:
        assert audited(copy, tmp_path / "kept") == audit(bus, copy.topics, copy.store)


def test_another_run_of_the_same_name_is_not_mixed_into_an_archive(
    recorded: RecordedRun, place: Path, tmp_path: Path
) -> None:
    other = recorded.copy(tmp_path / "other")
    with Tamper(other) as log:
        row = log.rows("control")[0]
        log.put(replace(row, value=row.value + b" "))
    with pytest.raises(InvariantBroken, match=r"recorded\.control/0 differs at offset 0"):
        archive(other, place)


def test_an_archive_goes_on_where_the_log_goes_on(copy: RecordedRun, tmp_path: Path) -> None:
    archive(copy, tmp_path / "kept")
    head = load_manifest(tmp_path / "kept").head
    with closing(copy.open()) as bus, closing(bus.writer()) as writer:
        writer.append([Append(topic=copy.topics.metrics, value=b"{}")])
    again = archive(copy, tmp_path / "kept")
    assert (again.segments, again.records) == (1, 1)
    assert verify(tmp_path / "kept", expected=head).problems == []
