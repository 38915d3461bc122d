"""Repeated audits of a log: the same report, and whatever was cut or rewritten in between."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from dora_pipe.audit import auditor as auditor_module
from dora_pipe.audit import evidence as evidence_module
from dora_pipe.audit.auditor import Auditor, audit
from dora_pipe.audit.evidence import EvidenceBuffer
from dora_pipe.audit.last_look import LastLook, changed_since
from dora_pipe.audit.report import plain
from dora_pipe.audit.spill import SpillFile
from dora_pipe.bus.base import EMPTY_POLLS_MAX, BusWrapper, ReaderWrapper
from dora_pipe.bus.bus import Reader, TopicSpec
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.core.errors import BusError
from dora_pipe.core.pure.records import Record, TopicPartition
from tests.support import damage
from tests.support.cluster import Cluster, SimulatedParts, make_config
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Tamper


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor_module, "PIECE_ROUNDS", 3)
    monkeypatch.setattr(auditor_module, "VERSIONS_KEPT", 1)
    monkeypatch.setattr(evidence_module, "WAITING_MAX", 4)


def test_spilled_audit_reports_what_one_in_memory_reports(
    recorded: RecordedRun, request: pytest.FixtureRequest
) -> None:
    expected = plain(audited(recorded))
    request.getfixturevalue("small_pieces")
    with closing(recorded.open()) as bus:
        assert plain(audit(bus, recorded.topics, recorded.store)) == expected


@pytest.mark.usefixtures("small_pieces")
def test_memory_of_an_audit_follows_what_is_open(recorded: RecordedRun) -> None:
    ended: list[int] = []
    old: list[int] = []

    def note() -> None:
        ledger = auditor.ledger
        ended.append(len(ledger.accounts.groups) - len(ledger.accounts.open))
        ended.append(sum(worker.gone is not None for worker in ledger.accounts.workers.values()))
        old.extend([len(ledger.versions), len(ledger.steps), len(ledger.takes)])

    with (
        closing(recorded.open()) as bus,
        closing(Auditor(bus, recorded.topics, None, on_piece=note)) as auditor,
    ):
        auditor.advance()
        note()
        assert auditor.finish().holds
    assert set(ended) == {0}
    assert max(old) <= 5  # the newest, and those that open groups carry


@pytest.mark.usefixtures("small_pieces")
def test_audit_that_follows_a_run_reports_what_a_new_one_reports(tmp_path: Path) -> None:
    config, parts = make_config(run__steps=10), SimulatedParts(versions=3)
    with Cluster(tmp_path / "run", config, parts=parts, on_disk=False) as cluster:
        cluster.ticks(61)
        with closing(Auditor(cluster.bus, cluster.topics, cluster.store.root)) as auditor:
            while cluster.roles:
                cluster.ticks(61)
                auditor.advance()
            fresh = audit(cluster.bus, cluster.topics, cluster.store.root)
            assert plain(auditor.finish()) == plain(fresh)
    assert fresh.holds and fresh.finished


def test_quick_audit_opens_no_value(recorded: RecordedRun) -> None:
    with (
        closing(recorded.open()) as bus,
        closing(Auditor(bus, recorded.topics, None, full=False)) as auditor,
    ):
        auditor.advance()
        quick = auditor.finish()
    assert quick.holds
    assert quick.plans == 0
    assert any("--quick" in note for note in quick.notes)
    assert quick.versions_each == {}


def _look(run: RecordedRun, mark: str = "") -> LastLook:
    with closing(run.open()) as bus, closing(Auditor(bus, run.topics, None)) as auditor:
        auditor.advance()
        look = auditor.look(mark)
    assert look is not None
    return look


def _changed(run: RecordedRun, look: LastLook, mark: str = "") -> str:
    with closing(run.open()) as bus:
        return changed_since(look, bus, run.topics, mark)


def test_look_at_another_log_is_not_compared(recorded: RecordedRun, tmp_path: Path) -> None:
    look = _look(recorded)
    with Cluster(tmp_path / "other", make_config(run__name="recorded", run__steps=3)) as cluster:
        cluster.run()
        assert changed_since(look, cluster.bus, cluster.topics, "") == ""
        assert changed_since(look, cluster.bus, recorded.topics, "1:2") == ""


def test_log_that_became_shorter_is_named(copy: RecordedRun) -> None:
    look = _look(copy)
    assert _changed(copy, look) == ""
    _cut(copy.log, f"{copy.run}.decisions", 40)
    assert "decisions:0 ends at" in _changed(copy, look)
    assert _changed(copy, look, "another file") == ""


def test_record_that_is_another_one_than_audit_has_seen_is_named(copy: RecordedRun) -> None:
    look = _look(copy)
    with sqlite3.connect(copy.log) as log:
        rows = log.execute(
            "SELECT max(at) FROM records WHERE at >> 52 = (SELECT id FROM topics WHERE name = ?)",
            (f"{copy.run}.decisions",),
        )
        (last,) = rows.fetchone()
        log.execute("UPDATE records SET value = CAST(value || ' ' AS BLOB) WHERE at = ?", (last,))
    log.close()
    assert "has another record at offset" in _changed(copy, look)


def test_forged_log_whose_chain_was_mended_is_named_by_its_last_round(copy: RecordedRun) -> None:
    look = _look(copy)
    with Tamper(copy) as log:
        damage.forge_everything(log)
    assert "decisions:0 has another record at offset" in _changed(copy, look)


def test_nothing_is_noted_of_a_log_that_does_not_hold(copy: RecordedRun) -> None:
    _cut(copy.log, f"{copy.run}.trajectories", 5)
    with closing(copy.open()) as bus, closing(Auditor(bus, copy.topics, None)) as auditor:
        auditor.advance()
        assert auditor.look("") is None


def test_trajectories_behind_the_end_of_their_partition_are_one_line(copy: RecordedRun) -> None:
    _cut(copy.log, f"{copy.run}.trajectories", 5)
    lines = [
        violation.line for violation in audited(copy).violations if "was cut" in violation.line
    ]
    assert lines
    assert len(lines) <= 3
    assert "was cut before" in lines[0]


@pytest.mark.parametrize("held_back", [True, False])
def test_log_that_holds_records_back_is_slow_and_not_cut(held_back: bool) -> None:
    partition = TopicPartition("t", 0)

    class Delayed(ReaderWrapper):
        polls = 0

        def poll(self, *, timeout_s: float, **_: int) -> list[Record]:
            assert timeout_s or not self.polls, "a busy wait"
            self.polls += 1
            return []

        def position(self, tp: TopicPartition) -> int:
            return 5 if self.polls > 2 * EMPTY_POLLS_MAX else 0

        def held_back(self) -> list[TopicPartition]:
            return [partition] if held_back else []

    class Slow(BusWrapper):
        def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
            return Delayed(self.inner.reader(positions))

    inner = MemoryBus()
    inner.create([TopicSpec(name="t", partitions=1)])
    buffer = EvidenceBuffer(SpillFile())
    buffer.begin(Slow(inner), "t", {0: 5}, opened=True)
    with nullcontext() if held_back else pytest.raises(BusError, match="no record came at"):
        buffer.read_all()


def _cut(log: Path, topic: str, records: int) -> None:
    with sqlite3.connect(log) as connection:
        (number,) = connection.execute("SELECT id FROM topics WHERE name = ?", (topic,)).fetchone()
        remaining: dict[int, int] = {}
        for index, partition in _rows(connection, number):
            if remaining.setdefault(partition, records) > 0:
                remaining[partition] -= 1
                connection.execute("DELETE FROM records WHERE at = ?", (index,))
    connection.close()


def _rows(connection: sqlite3.Connection, number: int) -> Iterator[tuple[int, int]]:
    sql = "SELECT at, at >> 40 FROM records WHERE at >> 52 = ? ORDER BY at DESC"
    return iter(connection.execute(sql, (number,)).fetchall())
