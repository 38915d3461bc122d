"""Read control and decisions in fold order and check the links between rounds.

A round folds the control records before its `control_next`; unfolded ones come last. Links use the
previous recorded chain, so that one break does not hide others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dora_pipe.audit.findings import Findings
from dora_pipe.audit.reading import Buried, Horizon
from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.schemas.control import AnyControl, decode_control
from dora_pipe.schemas.rounds import GENESIS_CHAIN, Round, chain_of, decode_round, fold_bytes
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown, sha256_hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A control record; `record`: None if unreadable."""

    offset: int
    key: bytes
    value: bytes
    record: AnyControl | Unknown | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedRound:
    """A round with its events, or unfolded events."""

    offset: int
    """-1 without a round."""
    round: Round | None
    facts: tuple[Fact, ...]


@dataclass(slots=True, kw_only=True)
class Cursor:
    """Position between rounds."""

    decisions_next: int = 0
    control_next: int = 0
    """Control offset after the returned events."""
    cut: bool = False
    """Already reported."""
    decisions_cut: bool = False
    round: int = -1
    offset: int = -1
    sha256: str = ""
    first: tuple[int, str] = (-1, "")
    now_ns: int = 0
    incarnation: int = 0
    chain: str = GENESIS_CHAIN


class RoundReader:
    """Reader that advances a cursor; `rest` comes last."""

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        findings: Findings,
        *,
        horizon: Horizon,
        cursor: Cursor | None = None,
        buried: Collection[Buried] = (),
    ) -> None:
        self.cursor = cursor or Cursor()
        self._findings = findings
        self._horizon = horizon
        decisions, control = TopicPartition(topics.decisions, 0), TopicPartition(topics.control, 0)
        control_next, decisions_next = self.cursor.control_next, self.cursor.decisions_next
        self._buried = buried
        self._control = records_of(bus, {control: horizon.control}, start=control_next)
        self._next = next(self._control, None)
        self._rounds = records_of(bus, {decisions: horizon.decisions}, start=decisions_next)

    def rounds(self) -> Iterator[FoldedRound]:
        """Yield rounds; the cursor advances before each yield."""
        cursor, findings = self.cursor, self._findings
        for record in self._rounds:
            cursor.decisions_next = record.offset + 1
            try:
                round_ = decode_round(record.value)
            except SchemaError as error:
                where = f"decisions:{record.offset}"
                findings.add("rounds", where, f"cannot be read: {error.message}")
                continue
            if record.key:
                who = f"round {round_.ordinal}"
                findings.add("rounds", who, "has a key", expected="none", actual=record.key)
            folded = self._below(round_.control_next, f"round {round_.ordinal}")
            _check_link(cursor, round_, folded, findings)
            cursor.offset, cursor.sha256 = record.offset, sha256_hex(record.value)
            if cursor.first[0] < 0 and folded:
                cursor.first = folded[0].offset, sha256_hex(folded[0].value)
            yield FoldedRound(offset=record.offset, round=round_, facts=folded)

    def rest(self) -> FoldedRound:
        """Return the unfolded events; invalidates the cursor."""
        position = max(self._horizon.control_before, self.cursor.control_next)
        return FoldedRound(offset=-1, round=None, facts=self._below(position, "the end"))

    def close(self) -> None:
        self._rounds.close()
        self._control.close()

    def _below(self, position: int, who: str) -> tuple[Fact, ...]:
        if position < self.cursor.control_next:
            self._findings.add(
                "rounds",
                who,
                "goes back in control",
                expected=f"control_next >= {self.cursor.control_next}",
                actual=position,
            )
        if position > self._horizon.control and not self.cursor.cut:
            self.cursor.cut = True
            self._findings.add(
                "rounds",
                who,
                "folds control records that are not there: the log was cut",
                expected=f"control_next <= {self._horizon.control}",
                actual=position,
            )
        self.cursor.control_next = max(position, self.cursor.control_next)
        taken: list[Fact] = []
        while self._next is not None and self._next.offset < position:
            taken.append(self._fact(self._next))
            self._next = next(self._control, None)
        return tuple(taken)

    def _fact(self, record: Record) -> Fact:
        decoded: AnyControl | Unknown | None = None
        try:
            decoded = decode_control(record.value)
        except SchemaError as error:
            where, message = f"control:{record.offset}", f"cannot be read: {error.message}"
            if (record.topic, record.partition, record.offset) in self._buried:
                self._findings.notes.append(f"{where} {message}; it is among the dead letters")
            else:
                self._findings.add("control", where, message)
        return Fact(offset=record.offset, key=record.key, value=record.value, record=decoded)


def _check_link(
    cursor: Cursor, round_: Round, folded: tuple[Fact, ...], findings: Findings
) -> None:
    who, first = f"round {round_.ordinal}", cursor.offset < 0
    findings.same("rounds", who, "wrong ordinal", expected=cursor.round + 1, actual=round_.ordinal)
    if not first and round_.now_ns < cursor.now_ns:
        actual, floor = round_.now_ns, f">= {cursor.now_ns}"
        findings.add("rounds", who, "goes back in time", expected=floor, actual=actual)
    if not first and round_.incarnation < cursor.incarnation:
        actual, floor = round_.incarnation, f">= {cursor.incarnation}"
        findings.add("rounds", who, "is of a fenced orchestrator", expected=floor, actual=actual)
    content = b"".join(fold_bytes(fact.offset, fact.value) for fact in folded)
    chain = chain_of(cursor.chain, content, round_)
    message = "the chain is broken: this round, or a control record it folds, was changed"
    findings.same("rounds", who, message, expected=chain, actual=round_.chain)
    cursor.round, cursor.now_ns = round_.ordinal, round_.now_ns
    cursor.incarnation, cursor.chain = round_.incarnation, round_.chain
