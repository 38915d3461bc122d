"""Incremental audit of a log, in fold order.

A piece is a few rounds with their events and records. Ended groups, steps and files are checked and
spilled, so memory depends on what is open. A log whose every record was rewritten consistently
passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.audit import report
from dora_pipe.audit.check_fold import FoldCheck
from dora_pipe.audit.check_policies import PolicyCheck
from dora_pipe.audit.check_records import RecordCheck
from dora_pipe.audit.check_steps import check_steps
from dora_pipe.audit.evidence import EvidenceBuffer, Place
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.last_look import LastLook, changed_since
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.reading import Horizon, gc_paused, horizon_of, read_buried
from dora_pipe.audit.report import AuditReport
from dora_pipe.audit.round_reader import Cursor, FoldedRound, RoundReader
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.ledger.history import RecordLogged
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore, as_store

PIECE_RECORDS: Final = 2000
"""RecordLogged trajectories that end a piece."""

PIECE_ROUNDS: Final = 500

VERSIONS_KEPT: Final = 8
"""Newest versions, steps and batches kept in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditProgress:
    rounds: int
    steps: int
    records: int
    bytes: int
    violations: int


class Auditor:
    """Audit of one run. Example: ``auditor.advance(); auditor.finish().holds``.

    `full` also decodes values and remakes plans.
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        store: PolicyStore | Path | None,
        *,
        full: bool = True,
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus, self._topics = bus, topics
        self._store = None if store is None else as_store(store)
        self._full = full
        self.findings = Findings()
        self.ledger = Ledger(topics.run, self.findings)
        self.cursor = Cursor()
        self._fold = FoldCheck(self.findings, plans=full)
        self._records = RecordCheck(self.ledger)
        self._policies = PolicyCheck(self.ledger)
        self._evidence = EvidenceBuffer(self.ledger.file)
        self._shorter: list[str] = []
        """Partitions that are shorter than when they were read."""
        self._on_piece = on_piece
        self._horizon: Horizon | None = None
        self._rounds: RoundReader | None = None

    @property
    def stopped(self) -> bool:
        """Report whether the run has ended and was read completely."""
        return self.ledger.stopped is not None

    @property
    def progress(self) -> AuditProgress:
        return AuditProgress(
            rounds=self.ledger.rounds,
            steps=self.ledger.committed,
            records=self._records.seen.records,
            bytes=self._records.seen.bytes,
            violations=self.findings.total,
        )

    def advance(self) -> None:
        """Read every available round and the records it names. Raises BusError."""
        with gc_paused():
            self._advance()

    def _advance(self) -> None:
        self._horizon = horizon = horizon_of(self._bus, self._topics)
        self._records.buried = buried = read_buried(self._bus, self._topics)
        ends = {tp.partition: end for tp, end in horizon.trajectories.items()}
        self._evidence.begin(self._bus, self._topics.trajectories, ends, opened=self._full)
        self._compare(ends)
        self.close_rounds()
        reader = self._rounds = RoundReader(
            self._bus,
            self._topics,
            self.findings,
            horizon=horizon,
            cursor=self.cursor,
            buried=buried,
        )
        logged, rounds = self.ledger.accounts.records, 0
        for turn in reader.rounds():
            self._apply(turn)
            rounds += 1
            far = self.ledger.accounts.records - logged >= PIECE_RECORDS
            if far or rounds >= PIECE_ROUNDS:
                self._settle()
                self._on_piece()
                logged, rounds = self.ledger.accounts.records, 0
        self._settle()

    def compare(self, look: LastLook, mark: str) -> None:
        """Report what is missing or changed since the last audit. Raises BusError."""
        if line := changed_since(look, self._bus, self._topics, mark):
            self.findings.add("records", "log", line)

    def look(self, mark: str) -> LastLook | None:
        """Return the position in the log; None before the first round or after a violation."""
        cursor = self.cursor
        if self.findings.total or cursor.offset < 0 or cursor.first[0] < 0:
            return None
        return LastLook(
            run=self.ledger.run,
            mark=mark,
            control=cursor.first,
            decisions=(cursor.offset, cursor.sha256),
            trajectories=dict(self._evidence.last),
        )

    def finish(self) -> AuditReport:
        """Check unfolded events and unnamed records, and return the report.

        The ledger is unusable afterwards.
        """
        assert self._rounds is not None, "nothing was read yet"
        self._apply(self._rounds.rest())
        if self.ledger.started is None:
            self.findings.add("control", self._topics.control, "there is no `run started`")
        self._check_topics()
        self._evidence.read_all()
        self._settle()
        self._judge(dict(self.ledger.accounts.unread))
        self._judge_unnamed()
        self._policies.finish()
        if self._store is None:
            self.findings.notes.append("policy files were not looked at: no store was given")
        return report.report_of(self.ledger, self._fold, self._records.seen)

    def close_rounds(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None

    def close(self) -> None:
        self.close_rounds()
        self._evidence.close()
        self.ledger.file.close()

    def _apply(self, turn: FoldedRound) -> None:
        self.ledger.apply(turn)
        self._fold.fold(turn)
        if turn.round is not None:
            for fact in turn.facts:
                if isinstance(fact.record, StepCommitted):
                    self._acknowledged(fact.record)

    def _acknowledged(self, fact: StepCommitted) -> None:
        assert self._horizon is not None
        end = self._horizon.decisions
        if fact.decisions_next > end and not self.cursor.decisions_cut:
            self.cursor.decisions_cut = True
            message = f"were cut: step {fact.step} was committed after more of them"
            expected = f"end >= {fact.decisions_next}"
            self.findings.add("rounds", "decisions", message, expected=expected, actual=end)

    def _compare(self, ends: dict[int, int]) -> None:
        assert self._horizon is not None
        read = [("decisions", self._horizon.decisions, self.cursor.decisions_next)]
        positions = self._evidence.positions
        read += [
            (f"trajectories:{partition}", end, positions.get(partition, 0))
            for partition, end in ends.items()
        ]
        for name, end, position in read:
            if end < position and name not in self._shorter:
                self._shorter.append(name)
                message = "was cut: it is shorter than when audit has read it"
                expected = f"end >= {position}"
                self.findings.add("records", name, message, expected=expected, actual=end)

    def _settle(self) -> None:
        ledger, accounts = self.ledger, self.ledger.accounts
        ended = accounts.settle()
        named = ((logged.place, logged) for group in ended for logged in group.records)
        self._judge({key: logged for key, logged in named if key in accounts.unread})
        steps, ledger.unread_steps = ledger.unread_steps, []
        versions, ledger.unread_versions = ledger.unread_versions, []
        check_steps(ledger, self._records.seen, steps)
        if self._store is not None:
            self._policies.look(self._store, versions, steps)
        accounts.spill(ended + accounts.settle())
        ledger.spill(VERSIONS_KEPT)

    def _judge(self, unread: dict[Place, RecordLogged]) -> None:
        unread_places = self.ledger.accounts.unread
        furthest: dict[int, int] = {}
        for partition, offset in unread:
            furthest[partition] = max(offset, furthest.get(partition, -1))
        for partition, offset in furthest.items():
            self._evidence.read_to(partition, offset)
        missing: dict[int, list[RecordLogged]] = {}
        for key, logged in unread.items():
            del unread_places[key]
            evidence = self._evidence.pop(key)
            if evidence is not None:
                self._records.judge(evidence, logged)
            else:
                missing.setdefault(logged.fact.partition, []).append(logged)
        for partition, records in sorted(missing.items()):
            self._missing(partition, records)

    def _missing(self, partition: int, missing: list[RecordLogged]) -> None:
        assert self._horizon is not None
        ends = {tp.partition: end for tp, end in self._horizon.trajectories.items()}
        end = ends.get(partition, 0)
        behind = [logged for logged in missing if logged.fact.offset >= end]
        if behind and partition in ends:
            self._records.cut(partition, end, behind)
        for logged in missing:
            if logged.fact.offset < end or partition not in ends:
                self._records.missing(logged)

    def _check_topics(self) -> None:
        config, topics, bus = self.ledger.config, self._topics, self._bus
        many = () if config is None else (topics.trajectories, topics.progress)
        there = set(bus.topics())
        for name in topics.all():
            if name in there and name != topics.metrics:
                expected = config.bus.partitions if config is not None and name in many else 1
                message = "has another number of partitions than the run reads"
                actual = bus.partitions(name)
                self.findings.same("records", name, message, expected=expected, actual=actual)
        for name in sorted(there.difference(topics.all())):
            if name.startswith(f"{topics.run}."):
                self.findings.notes.append(f"topic {name} is unknown to this version")

    def _judge_unnamed(self) -> None:
        """Check records without an event, except those appended during this audit."""
        assert self._horizon is not None
        before = {tp.partition: end for tp, end in self._horizon.trajectories_before.items()}
        for evidence in self._evidence.rest():
            if evidence.offset < before[evidence.partition]:
                self._records.judge(evidence, None)


def audit(bus: Bus, topics: Topics, store: PolicyStore | Path | None) -> AuditReport:
    """Audit a whole log; without `store`, policy files are skipped. Raises BusError if the log
    cannot be read; violations are in the report."""
    auditor = Auditor(bus, topics, store)
    try:
        auditor.advance()
        return auditor.finish()
    finally:
        auditor.close()


def raise_if_broken(audited: AuditReport) -> None:
    """Raise InvariantBroken with the first violation, if any."""
    if audited.holds:
        return
    first = audited.violations[0]
    more = f" (and {audited.violations_total - 1} more)" if audited.violations_total > 1 else ""
    raise InvariantBroken(f"{first.line}{more}")
