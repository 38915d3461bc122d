"""Audits a log piece by piece: decides when a group, a record and a step were looked at enough.

A piece is some rounds with the facts they fold. Then the records that those facts name are read;
groups that have ended are held against their records, steps against their groups, files against
their steps; and what nobody will ask for again is put away. What is kept in memory so depends on
what is open, not on how long the run is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.audit import report
from dora_pipe.audit.audit_state import AuditState
from dora_pipe.audit.check_steps import check_steps
from dora_pipe.audit.entries import Logged
from dora_pipe.audit.evidence import Place
from dora_pipe.audit.gathering import OwnReader, Source
from dora_pipe.audit.reading import Horizon, gc_paused, horizon_of, read_buried
from dora_pipe.audit.report import AuditReport
from dora_pipe.audit.round_reader import FoldedRound, RoundReader
from dora_pipe.bus.port import Bus
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore, as_store

PIECE_RECORDS: Final = 2000
"""Logged trajectories after which a piece ends."""

PIECE_ROUNDS: Final = 500

VERSIONS_KEPT: Final = 8
"""The newest versions, steps and batches stay in memory, and those that open groups carry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an audit has come."""

    rounds: int
    steps: int
    records: int
    bytes: int
    violations: int


class Auditor:
    """See the head of this file. Example: ``auditor.advance(); auditor.finish().holds``.

    `source` opens what reads the trajectories topic, from positions to ends by partition; without
    one, or where it gives None, this process reads it.
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        store: PolicyStore | Path | None,
        *,
        books: AuditState | None = None,
        whole: bool = True,
        source: Callable[[dict[int, int], dict[int, int]], Source | None] | None = None,
        on_piece: Callable[[], None] = lambda: None,
    ) -> None:
        self._bus, self._topics = bus, topics
        self._store = None if store is None else as_store(store)
        self.books = books or AuditState(topics.run, whole=whole)
        self.books.files = self.books.files or store is not None
        self._source = source
        self._on_piece = on_piece
        self._horizon: Horizon | None = None
        self._rounds: RoundReader | None = None

    @property
    def stopped(self) -> bool:
        """Whether the run has ended and everything of it was read."""
        return self.books.ledger.stopped is not None

    @property
    def progress(self) -> Progress:
        """How far this has come."""
        books = self.books
        return Progress(
            rounds=books.ledger.rounds,
            steps=books.ledger.committed,
            records=books.records.seen.records,
            bytes=books.records.seen.bytes,
            violations=books.findings.total,
        )

    def advance(self) -> None:
        """Read every round that is there now, and what it names. Raises BusError."""
        with gc_paused():
            self._advance()

    def _advance(self) -> None:
        books = self.books
        self._horizon = horizon = horizon_of(self._bus, self._topics)
        books.records.buried = buried = read_buried(self._bus, self._topics)
        ends = {tp.partition: end for tp, end in horizon.trajectories.items()}
        books.gathering.begin(ends, lambda behind: self._open(behind, ends))
        self._compare(ends)
        self.close_rounds()
        reader = self._rounds = RoundReader(
            self._bus,
            self._topics,
            books.findings,
            horizon=horizon,
            cursor=books.cursor,
            buried=buried,
        )
        logged, rounds = books.ledger.accounts.records, 0
        for turn in reader.rounds():
            self._take(turn)
            rounds += 1
            far = books.ledger.accounts.records - logged >= PIECE_RECORDS
            if far or rounds >= PIECE_ROUNDS:
                self._settle()
                self._on_piece()
                logged, rounds = books.ledger.accounts.records, 0
        self._settle()

    def finish(self) -> AuditReport:
        """Look at what no round has folded and nobody has named, too, and report.

        The books are of no use then: what was looked at ahead of its round would be booked twice.
        """
        assert self._rounds is not None, "nothing was read yet"
        self._take(self._rounds.rest())
        books = self.books
        if books.ledger.started is None:
            books.findings.add("control", self._topics.control, "there is no `run started`")
        self._check_topics()
        books.gathering.read_all()
        self._settle()
        self._judge(dict(books.ledger.accounts.unread))
        self._judge_unnamed()
        books.policies.finish()
        if self._store is None:
            books.findings.notes.append("policy files were not looked at: no store was given")
        return report.report_of(books.ledger, books.fold, books.records.seen)

    def close_rounds(self) -> None:
        """Let go of control and decisions."""
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None

    def close(self) -> None:
        """Let go of the log."""
        self.close_rounds()
        self.books.gathering.close()

    def _open(self, positions: dict[int, int], ends: dict[int, int]) -> Source:
        found = None if self._source is None else self._source(positions, ends)
        if found is not None:
            return found
        topic, whole = self._topics.trajectories, self.books.whole
        return OwnReader(self._bus, topic, positions, opened=whole)

    def _take(self, turn: FoldedRound) -> None:
        books = self.books
        books.ledger.apply(turn)
        books.fold.take(turn)
        if turn.round is not None:
            for fact in turn.facts:
                if isinstance(fact.record, StepCommitted):
                    self._acknowledged(fact.record)

    def _acknowledged(self, fact: StepCommitted) -> None:
        """A commit says how far its trainer had read decisions: that cannot be gone."""
        assert self._horizon is not None
        books, end = self.books, self._horizon.decisions
        if fact.decisions_next > end and not books.cursor.decisions_cut:
            books.cursor.decisions_cut = True
            message = f"were cut: step {fact.step} was committed after more of them"
            expected = f"end >= {fact.decisions_next}"
            books.findings.add("rounds", "decisions", message, expected=expected, found=end)

    def _compare(self, ends: dict[int, int]) -> None:
        """What was read once cannot be gone: partitions only become longer."""
        assert self._horizon is not None
        books, found = self.books, []
        read = [("decisions", self._horizon.decisions, books.cursor.decisions_next)]
        positions = books.gathering.positions
        read += [(f"trajectories:{one}", end, positions.get(one, 0)) for one, end in ends.items()]
        for name, end, position in read:
            if end < position and name not in books.shorter:
                books.shorter.append(name)
                found.append((name, end, position))
        for name, end, position in found:
            message = "was cut: it is shorter than when audit has read it"
            expected = f"end >= {position}"
            books.findings.add("records", name, message, expected=expected, found=end)

    def _settle(self) -> None:
        """Look at what has ended, and let go of it."""
        books = self.books
        ledger, accounts = books.ledger, books.ledger.accounts
        ended = accounts.settle()
        named = ((one.place, one) for group in ended for one in group.records)
        self._judge({place: one for place, one in named if place in accounts.unread})
        steps, ledger.unread_steps = ledger.unread_steps, []
        versions, ledger.unread_versions = ledger.unread_versions, []
        check_steps(ledger, books.records.seen, steps)
        if self._store is not None:
            books.policies.look(self._store, versions, steps)
        accounts.spill(ended + accounts.settle())
        ledger.spill(VERSIONS_KEPT)

    def _judge(self, unread: dict[Place, Logged]) -> None:
        """Hold these against their records, reading as far as that takes."""
        books, unread_places = self.books, self.books.ledger.accounts.unread
        furthest: dict[int, int] = {}
        for partition, offset in unread:
            furthest[partition] = max(offset, furthest.get(partition, -1))
        for partition, offset in furthest.items():
            books.gathering.read_to(partition, offset)
        gone: dict[int, list[Logged]] = {}
        for place, one in unread.items():
            del unread_places[place]
            evidence = books.gathering.take(place)
            if evidence is not None:
                books.records.judge(evidence, one)
            else:
                gone.setdefault(one.fact.partition, []).append(one)
        for partition, found in sorted(gone.items()):
            self._missing(partition, found)

    def _missing(self, partition: int, gone: list[Logged]) -> None:
        assert self._horizon is not None
        ends = {tp.partition: end for tp, end in self._horizon.trajectories.items()}
        end = ends.get(partition, 0)
        behind = [one for one in gone if one.fact.offset >= end]
        if behind and partition in ends:
            self.books.records.cut(partition, end, behind)
        for one in gone:
            if one.fact.offset < end or partition not in ends:
                self.books.records.missing(one)

    def _check_topics(self) -> None:
        """Every topic has the partitions that the run has: readers look at no others."""
        config, topics, bus = self.books.ledger.config, self._topics, self._bus
        many = () if config is None else (topics.trajectories, topics.progress)
        there = set(bus.topics())
        for name in topics.all():
            if name in there and name != topics.metrics:
                wanted = config.bus.partitions if config is not None and name in many else 1
                message = "has other partitions than the run's: what lies beyond is read by nobody"
                found = bus.partitions(name)
                self.books.findings.same("records", name, message, expected=wanted, found=found)
        for name in sorted(there.difference(topics.all())):
            if name.startswith(f"{topics.run}."):
                self.books.findings.notes.append(f"topic {name} is none that this version knows")

    def _judge_unnamed(self) -> None:
        """Records that nobody has named: of workers that were lost, or have yet to say so.

        One that came after this look began is none of its business.
        """
        assert self._horizon is not None
        before = {tp.partition: end for tp, end in self._horizon.trajectories_before.items()}
        for one in self.books.gathering.rest():
            if one.offset < before[one.partition]:
                self.books.records.judge(one, None)
