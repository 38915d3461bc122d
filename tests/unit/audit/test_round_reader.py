"""Tests of the walk over control and decisions: links, local breaks."""

from __future__ import annotations

import msgspec
import pytest

from dora_pipe.audit.findings import Findings
from dora_pipe.audit.reading import read_buried, record_at, records_at
from dora_pipe.audit.round_reader import FoldedRound
from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.dead_letter import DeadLetter, encode_dead_letter
from dora_pipe.schemas.rounds import GENESIS_CHAIN, Round, chain_of, fold_bytes
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support.ledgers import folded_rounds

TOPICS = Topics("w")


class Log:
    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryLog())
        self.bus.create([TopicSpec(name=name) for name in TOPICS.all()])
        self.writer = self.bus.writer()
        self.chain = GENESIS_CHAIN
        self.rounds = 0
        self.folded: list[tuple[int, bytes]] = []

    def fact(self, value: bytes = b"") -> int:
        value = value or encode(Command(at_ns=0, user="u", verb="pause"))
        (offset,) = self.writer.append([Append(topic=TOPICS.control, value=value)])
        self.folded.append((offset, value))
        return offset

    def round(self, **changes: object) -> Round:
        next_ = self.bus.end(TopicPartition(TOPICS.control, 0))
        bare = Round(
            ordinal=self.rounds, incarnation=1, now_ns=10 * self.rounds, control_next=next_
        )
        content = b"".join(fold_bytes(offset, value) for offset, value in self.folded)
        chain = chain_of(self.chain, content, bare)
        written = msgspec.structs.replace(bare, **({"chain": chain} | changes))
        self.writer.append([Append(topic=TOPICS.decisions, value=encode(written))])
        self.rounds, self.folded, self.chain = self.rounds + 1, [], written.chain
        return written

    def walk(self) -> tuple[list[FoldedRound], list[str]]:
        findings = Findings()
        buried = read_buried(self.bus, TOPICS)
        turns = list(folded_rounds(self.bus, TOPICS, findings, buried=buried))
        return turns, [violation.line for violation in findings.violations] + findings.notes


def test_every_fact_is_folded_by_exactly_one_turn_in_order() -> None:
    log = Log()
    offsets = [log.fact(), log.fact()]
    log.round()
    log.round()
    offsets.append(log.fact())
    log.round()
    offsets.append(log.fact())
    turns, result = log.walk()
    assert result == []
    assert [[fact.offset for fact in turn.facts] for turn in turns] == [
        offsets[:2],
        [],
        [offsets[2]],
        [offsets[3]],
    ]
    assert [turn.round is None for turn in turns] == [False, False, False, True]


def test_changed_round_breaks_the_chain_in_one_place() -> None:
    log = Log()
    for number in range(4):
        log.fact()
        log.round(**({"chain": "f" * 64} if number == 1 else {}))
    _, result = log.walk()
    assert len(result) == 1, "the rounds behind it chain on what it carries"
    assert "rounds round 1: the chain is broken" in result[0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ordinal": 7}, "wrong ordinal: expected 2, found 7"),
        ({"now_ns": 5}, "goes back in time: expected >= 10, found 5"),
        ({"incarnation": 0}, "is of a fenced orchestrator: expected >= 1, found 0"),
        ({"control_next": 0}, "goes back in control"),
        ({"control_next": 999}, "folds control records that are not there: the log was cut"),
    ],
)
def test_round_that_cannot_follow_is_named(changes: dict[str, object], text: str) -> None:
    log = Log()
    for number in range(3):
        log.fact()
        log.round(**(changes if number == 2 else {}))
    _, result = log.walk()
    assert any(text in line for line in result), result


def test_unreadable_round_is_named_and_walked_over() -> None:
    log = Log()
    log.round()
    log.writer.append([Append(topic=TOPICS.decisions, value=b"{}")])
    log.round()
    turns, result = log.walk()
    assert [turn.round.ordinal for turn in turns if turn.round is not None] == [0, 1]
    assert "cannot be read" in result[0]


def test_unreadable_fact_is_a_violation_unless_the_run_has_buried_it() -> None:
    log = Log()
    lost, buried = log.fact(b"\xff"), log.fact(b"nonsense")
    letter = DeadLetter(
        topic=TOPICS.control,
        partition=0,
        offset=buried,
        reason="not JSON",
        path="$",
        at_ns=1,
        key=b"",
        value=b"nonsense",
    )
    value, headers = encode_dead_letter(letter, max_record_bytes=10_000)
    log.writer.append([Append(topic=TOPICS.dead_letters, value=value, headers=headers)])
    log.writer.append([Append(topic=TOPICS.dead_letters, value=b"no dead letter")])
    log.round()
    _, result = log.walk()
    assert len(result) == 2
    assert result[0].startswith(f"control control:{lost}: cannot be read")
    assert result[1].startswith(f"control:{buried} cannot be read")
    assert result[1].endswith("it is among the dead letters")


def test_records_are_found_by_their_place_across_gaps() -> None:
    log = Log()
    offsets = [log.fact() for _ in range(5)]
    partition = TopicPartition(TOPICS.control, 0)
    assert offsets[1] > offsets[0] + 1, "offsets are not dense"
    records = records_at(log.bus, partition, [offsets[3], offsets[0], offsets[0] + 1, 999])
    assert [record.offset for record in records] == [offsets[0], offsets[3]]
    record = record_at(log.bus, partition, offsets[2])
    assert record is not None and record.offset == offsets[2]
    assert record_at(log.bus, partition, offsets[2] + 1) is None


def test_reading_ends_where_it_was_told_to() -> None:
    log = Log()
    first, second = log.fact(), log.fact()
    partition = TopicPartition(TOPICS.control, 0)
    assert [record.offset for record in records_of(log.bus, {partition: second})] == [first]
