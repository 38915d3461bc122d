"""Walks control and decisions in the order in which they are folded; checks what joins rounds.

A round folds the control records below its `control_next`, then its observations, then its
decisions. Control records that no round has folded yet come last, without a round. What is wrong
is collected and walked over, so that one break hides nothing behind it: a round's chain is
recomputed from the chain that the round before it carries.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.history.findings import Findings
from dora_pipe.history.reading import Buried, Horizon, horizon_of, records_of
from dora_pipe.schemas.control import AnyControl, decode_control
from dora_pipe.schemas.rounds import (
    GENESIS_CHAIN,
    Round,
    chain_of,
    decode_round,
    fold_bytes,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A control record where it lies; `record` is None when it could not be read."""

    offset: int
    key: bytes
    value: bytes
    record: AnyControl | Unknown | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A round with the facts it folds; without a round: facts that wait for one."""

    offset: int
    """Of the round in the decisions topic; -1 without one."""
    round: Round | None
    facts: tuple[Fact, ...]


def walk(
    bus: Bus,
    topics: Topics,
    findings: Findings,
    *,
    horizon: Horizon | None = None,
    buried: Collection[Buried] = (),
) -> Iterator[Turn]:
    """Every round with its facts, then the facts that no round has folded yet.

    A control record that cannot be read is a violation unless it is among the dead letters: then
    the run has dealt with it.
    """
    ends = horizon or horizon_of(bus, topics)
    decisions, control = TopicPartition(topics.decisions, 0), TopicPartition(topics.control, 0)
    facts = _Facts(records_of(bus, {control: ends.control}), ends.control, findings, buried)
    links = _Links(findings)
    for record in records_of(bus, {decisions: ends.decisions}):
        try:
            round_ = decode_round(record.value)
        except SchemaError as error:
            findings.add("rounds", f"decisions:{record.offset}", f"cannot be read: {error.message}")
            continue
        folded = facts.below(round_.control_next, f"round {round_.ordinal}")
        links.check(round_, folded)
        yield Turn(offset=record.offset, round=round_, facts=folded)
    yield Turn(offset=-1, round=None, facts=facts.rest(ends.control_before))


class _Facts:
    """Control records, taken piece by piece."""

    def __init__(
        self,
        records: Iterator[Record],
        end: int,
        findings: Findings,
        buried: Collection[Buried],
    ) -> None:
        self._buried = buried
        self._records = records
        self._end = end
        self._findings = findings
        self._next: Record | None = next(records, None)
        self._position = 0

    def below(self, position: int, who: str) -> tuple[Fact, ...]:
        """Facts with a smaller offset that were not taken yet."""
        if position < self._position:
            self._findings.add(
                "rounds",
                who,
                "goes back in control",
                expected=f"control_next >= {self._position}",
                found=position,
            )
        if position > self._end:
            self._findings.add(
                "rounds",
                who,
                "folds control records that are not there: the log was cut",
                expected=f"control_next <= {self._end}",
                found=position,
            )
        self._position = max(position, self._position)
        taken: list[Fact] = []
        while self._next is not None and self._next.offset < position:
            taken.append(self._fact(self._next))
            self._next = next(self._records, None)
        return tuple(taken)

    def rest(self, before: int) -> tuple[Fact, ...]:
        """Facts that were not taken yet, as far as they speak of what was walked over."""
        return self.below(max(before, self._position), "the end")

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


class _Links:
    """What must hold from one round to the next."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._last: Round | None = None

    def check(self, round_: Round, folded: tuple[Fact, ...]) -> None:
        """Ordinal, role epoch, time, chain."""
        who, last, findings = f"round {round_.ordinal}", self._last, self._findings
        previous = GENESIS_CHAIN if last is None else last.chain
        ordinal = 0 if last is None else last.ordinal + 1
        findings.same("rounds", who, "wrong ordinal", expected=ordinal, found=round_.ordinal)
        if last is not None and round_.now_ns < last.now_ns:
            found, floor = round_.now_ns, f">= {last.now_ns}"
            findings.add("rounds", who, "goes back in time", expected=floor, found=found)
        if last is not None and round_.role_epoch < last.role_epoch:
            found, floor = round_.role_epoch, f">= {last.role_epoch}"
            findings.add("rounds", who, "is of a fenced orchestrator", expected=floor, found=found)
        content = b"".join(fold_bytes(fact.offset, fact.value) for fact in folded)
        chain = chain_of(previous, content, round_)
        message = "the chain is broken: this round, or a control record it folds, was changed"
        findings.same("rounds", who, message, expected=chain, found=round_.chain)
        self._last = round_
