"""An audit goes on where the last one was, and says what one from the beginning says."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_pipe.audit import auditor as auditor_module
from dora_pipe.audit import evidence as evidence_module
from dora_pipe.audit.auditor import Auditor, audit, build_ledger
from dora_pipe.audit.describe import describe
from dora_pipe.audit.index import SCHEMA, AuditIndex, Opened, look_up, open_index
from dora_pipe.audit.report import AuditReport, plain
from dora_pipe.bus.port import Bus
from dora_pipe.schemas.topics import Topics
from tests.support.cluster import Cluster, SimulatedParts, make_config
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Tamper


def _look(
    path: Path | None, bus: Bus, topics: Topics, store: Path | None, *, whole: bool = True
) -> tuple[AuditReport, Opened]:
    """An audit with its index, as the command makes it."""
    opened = open_index(path, bus, topics, whole=whole, files=store is not None)
    auditor = Auditor(bus, topics, store, books=opened.books, whole=whole)
    try:
        auditor.advance()
        opened.index.remember(auditor.books)
        return auditor.finish(), opened
    finally:
        auditor.close()
        opened.index.close()


def _audit(
    run: RecordedRun, path: Path | None, *, files: bool = True, whole: bool = True
) -> tuple[AuditReport, Opened]:
    with closing(run.open()) as bus:
        return _look(path, bus, run.topics, run.store if files else None, whole=whole)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are small, and little waits in memory, as in a long run."""
    monkeypatch.setattr(auditor_module, "PIECE_ROUNDS", 3)
    monkeypatch.setattr(auditor_module, "VERSIONS_KEPT", 1)
    monkeypatch.setattr(evidence_module, "WAITING_MAX", 4)


@pytest.mark.usefixtures("small_pieces")
def test_audit_that_puts_everything_away_says_what_one_in_memory_says(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    with_index = tmp_path / "audit.sqlite"
    expected = plain(audited(recorded))
    first, opened = _audit(recorded, with_index)
    assert opened.again is None
    assert plain(first) == expected
    again, opened = _audit(recorded, with_index)
    assert opened.again is not None
    assert plain(again) == expected
    assert plain(_audit(recorded, None)[0]) == expected


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("versions", [1, 3])
def test_every_look_at_a_living_run_goes_on_from_the_last_and_says_the_same(
    tmp_path: Path, versions: int
) -> None:
    path, goings_on = tmp_path / "audit.sqlite", 0
    config, parts = make_config(run__steps=10), SimulatedParts(versions=versions)
    with Cluster(tmp_path / "run", config, parts=parts, on_disk=False) as cluster:
        while cluster.roles:
            cluster.ticks(61)
            found, opened = _look(path, cluster.bus, cluster.topics, cluster.store.root)
            fresh = audit(cluster.bus, cluster.topics, cluster.store.root)
            assert plain(found) == plain(fresh)
            assert found.holds
            goings_on += opened.again is not None
    assert found.finished
    assert goings_on > 5


def test_quick_audit_opens_no_value_and_is_not_gone_on_with_by_a_whole_one(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "audit.sqlite"
    quick, _ = _audit(recorded, path, files=False, whole=False)
    assert quick.holds
    assert quick.plans == 0
    assert any("--quick" in note for note in quick.notes)
    assert quick.versions_each == {}
    whole, opened = _audit(recorded, path)
    assert opened.again is None
    assert "looked at less" in opened.said
    assert whole.plans > 0
    after, opened = _audit(recorded, path, files=False, whole=False)
    assert opened.again is not None
    assert after.plans == whole.plans


def test_index_of_another_run_or_file_or_version_is_not_believed(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, bus, topics = tmp_path / "audit.sqlite", recorded.open(), recorded.topics
    _look(path, bus, topics, recorded.store)

    def said(**changes: object) -> str:
        wanted: dict[str, object] = {"whole": True, "files": True} | changes
        opened = open_index(path, bus, topics, **wanted)  # type: ignore[arg-type]
        opened.index.close()
        assert opened.again is None
        return opened.said

    assert "another file" in said(mark="1:2")
    assert said(fresh=True) == ""
    monkeypatch.setattr("dora_pipe.audit.index.fingerprint", lambda: "other code")
    assert "another version" in said()
    bus.close()


def test_index_beside_a_log_that_was_rewritten_is_not_believed(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "audit.sqlite"
    _audit(recorded, path)
    with Cluster(tmp_path / "other", make_config(run__name="recorded", run__steps=3)) as cluster:
        cluster.run()
        found, opened = _look(path, cluster.bus, cluster.topics, cluster.store.root)
    assert opened.again is None
    assert "another log" in opened.said
    assert found.holds


def test_log_that_became_shorter_is_one_line_and_stays_one(
    copy: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "audit.sqlite"
    _audit(copy, path)
    _cut(copy.log, f"{copy.run}.decisions", 40)
    for _ in range(2):
        found, opened = _audit(copy, path)
        lines = [one.line for one in found.violations if one.subject == "log"]
        assert len(lines) == 1
        assert "decisions:0 ends at" in lines[0]
        assert opened.again is None


def test_record_that_is_another_one_than_audit_has_seen_is_one_line(
    copy: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "audit.sqlite"
    _audit(copy, path)
    with sqlite3.connect(copy.log) as log:
        rows = log.execute(
            "SELECT max(at) FROM records WHERE at >> 52 = (SELECT id FROM topics WHERE name = ?)",
            (f"{copy.run}.decisions",),
        )
        (last,) = rows.fetchone()
        log.execute("UPDATE records SET value = CAST(value || ' ' AS BLOB) WHERE at = ?", (last,))
    log.close()
    found, _ = _audit(copy, path)
    assert any("has another record at offset" in one.line for one in found.violations)


@pytest.mark.parametrize("topic", ["decisions", "control"])
@pytest.mark.parametrize("changed", [False, True], ids=["gone", "changed"])
def test_record_of_the_middle_that_is_gone_or_changed_after_an_audit_is_named_by_the_next(
    recorded: RecordedRun, tmp_path: Path, topic: str, changed: bool
) -> None:
    copy = recorded.copy(tmp_path / "run")
    path = tmp_path / "audit.sqlite"
    assert _audit(copy, path)[0].holds
    with Tamper(copy) as log:
        rows = log.rows(topic)
        row = rows[len(rows) // 2]
        if changed:
            log.put(replace(row, value=row.value + b" "))
        else:
            log.remove(row)
    for _ in range(2):  # What it remembers stays, so that the next look says the same.
        again, opened = _audit(copy, path)
        assert opened.again is None
        (line,) = [one for one in again.violations if one.subject == "log"]
        assert line.message.startswith(f"{topic}:0 has other records below offset ")


def test_trajectories_behind_the_end_of_their_partition_are_one_line(copy: RecordedRun) -> None:
    _cut(copy.log, f"{copy.run}.trajectories", 5)
    lines = [one.line for one in audited(copy).violations if "was cut" in one.line]
    assert lines
    assert len(lines) <= 3
    assert "records that were logged lie behind its end" in lines[0]


def test_nothing_is_remembered_of_a_log_that_does_not_hold(
    copy: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "audit.sqlite"
    _cut(copy.log, f"{copy.run}.trajectories", 5)
    first, _ = _audit(copy, path)
    again, opened = _audit(copy, path)
    assert not first.holds
    assert opened.again is None
    assert plain(again) == plain(first)


@pytest.mark.parametrize("damage", ["garbage", "schema", "books"])
def test_index_that_cannot_be_read_is_begun_anew(
    recorded: RecordedRun, tmp_path: Path, damage: str
) -> None:
    path = tmp_path / "audit.sqlite"
    expected, _ = _audit(recorded, path)
    if damage == "garbage":
        path.write_bytes(b"no database" * 1000)
    else:
        with sqlite3.connect(path) as index:
            if damage == "schema":
                index.execute(f"PRAGMA user_version = {SCHEMA + 1}")
            else:
                index.execute("UPDATE meta SET value = ? WHERE name = 'books'", (b"\0" * 50,))
        index.close()
    found, opened = _audit(recorded, path)
    assert opened.again is None
    assert plain(found) == plain(expected)


def test_index_that_somebody_else_writes_is_left_alone(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    path = tmp_path / "audit.sqlite"
    with closing(AuditIndex(path)):
        found, opened = _audit(recorded, path, files=False)
    assert found.holds
    assert "cannot be used" in opened.said


def test_stories_from_the_index_are_those_from_the_log(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, bus = tmp_path / "audit.sqlite", recorded.open()
    ids = ["g0000000010-001", "g0000000010", "e0000000001", "3", "13"]
    expected = [describe(bus, recorded.topics, recorded.store, one) for one in ids]
    monkeypatch.setattr(auditor_module, "VERSIONS_KEPT", 1)
    _look(path, bus, recorded.topics, recorded.store)
    found = look_up(path, bus, recorded.topics)
    assert found is not None
    monkeypatch.setattr("dora_pipe.audit.describe.build_ledger", None)
    stories = [
        describe(bus, recorded.topics, recorded.store, one, known=found.books.ledger) for one in ids
    ]
    found.index.close()
    bus.close()
    assert stories == expected


def test_books_come_back_from_bytes_as_they_were(recorded: RecordedRun, tmp_path: Path) -> None:
    path, bus = tmp_path / "audit.sqlite", recorded.open()
    _look(path, bus, recorded.topics, None)
    index = AuditIndex(path)
    books = index.books()
    assert books is not None
    index.attach(books)
    ledger = build_ledger(bus, recorded.topics)
    for name, group in ledger.accounts.groups.items():
        kept = books.ledger.accounts.groups[name]
        for trajectory, entry in group.requests.items():  # What the steps' check has noted.
            entry.trained = kept.requests[trajectory].trained
        assert msgspec.to_builtins(kept) == msgspec.to_builtins(group)
    assert books.fold.state is not None
    assert books.fold.state.done
    index.close()
    bus.close()


def _cut(log: Path, topic: str, records: int) -> None:
    """The last records of every partition of a topic are gone, as after an unclean election."""
    with sqlite3.connect(log) as connection:
        (number,) = connection.execute("SELECT id FROM topics WHERE name = ?", (topic,)).fetchone()
        rows = connection.execute(
            "SELECT at, at >> 40 FROM records WHERE at >> 52 = ? ORDER BY at DESC", (number,)
        ).fetchall()
        left: dict[int, int] = {}
        for at, partition in rows:
            if left.setdefault(partition, records) > 0:
                left[partition] -= 1
                connection.execute("DELETE FROM records WHERE at = ?", (at,))
    connection.close()
