"""Who decides the batches of another run again: one after the other, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_pipe.bus.port import Record
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.runtime import CaughtUp, Now, StopAsked
from dora_pipe.orchestrator.batches_again import BatchesAgain, BatchRead, ReadBatch, Standing
from dora_pipe.schemas.control import BatchRefused, Offender
from dora_pipe.schemas.rounds import Round, StopRun, TakeBatch, chain_of, decode_round, fold_bytes
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support.orchestrator_records import committed

TOPICS = Topics("again")
NOW = Now(mono_ns=1, wall_ns=100)


def control(offset: int, fact: msgspec.Struct) -> Record:
    return Record(topic=TOPICS.control, partition=0, offset=offset, key=b"", value=encode(fact))


def take(step: int) -> TakeBatch:
    return TakeBatch(reason="again", step=step, attempt=1, groups=(), settings={})


class Stage:
    def __init__(self, standing: Standing | None = None, last: int = 6) -> None:
        at = standing or Standing(step=5, decided=4)
        self.machine = BatchesAgain(at, topics=TOPICS, last=last, role_epoch=3)
        self.rounds: list[Round] = []

    def react(self, *inputs: Any) -> list[Any]:
        out = self.machine.react(inputs, NOW)
        self.rounds += [decode_round(one.record.value) for one in out.publish]
        return out.effects


def test_nothing_is_asked_or_decided_before_the_log_is_read() -> None:
    stage = Stage()
    assert stage.react(control(0, committed(5, ()))) == []
    assert stage.rounds == []
    assert stage.react(CaughtUp()) == [ReadBatch(step=6)]


def test_a_batch_is_taken_once_the_step_before_it_is_committed() -> None:
    stage = Stage()
    assert stage.react(CaughtUp()) == [ReadBatch(step=5)]
    assert stage.react() == []
    assert stage.react(BatchRead(take=take(5))) == []
    assert stage.react() == []
    assert stage.react(control(4, committed(5, ()))) == [ReadBatch(step=6)]
    stage.react(BatchRead(take=take(6)))
    assert [one.decisions for one in stage.rounds] == [(take(5),), (take(6),)]
    assert [one.control_next for one in stage.rounds] == [0, 5]
    assert not stage.machine.finished


def test_the_last_commit_ends_the_run() -> None:
    stage = Stage(Standing(step=6, decided=6, ordinal=1))
    stage.react(CaughtUp(), control(9, committed(6, ())))
    (round_,) = stage.rounds
    assert isinstance(round_.decisions[0], StopRun)
    assert round_.ordinal == 2
    assert stage.machine.finished
    assert stage.react(control(10, committed(6, ()))) == []
    assert len(stage.rounds) == 1


def test_rounds_are_chained_over_the_control_records_that_they_fold() -> None:
    stage = Stage()
    first = control(2, committed(4, ()))
    stage.react(CaughtUp(), first)
    stage.react(BatchRead(take=take(5)))
    (round_,) = stage.rounds
    folded = fold_bytes(2, first.value)
    assert round_.chain == chain_of("0" * 64, folded, round_)
    assert stage.machine.standing.chain == round_.chain


def test_a_batch_that_the_trainer_refuses_ends_it_by_name() -> None:
    stage = Stage()
    stage.react(CaughtUp())
    refused = BatchRefused(
        at_ns=1,
        step=5,
        attempt=1,
        role_epoch=0,
        offenders=(Offender(group="g0000000001", trajectory="", why="it is gone"),) * 2,
    )
    with pytest.raises(InvariantBroken, match=r"step 5 .* g0000000001: it is gone \(and 1 more\)"):
        stage.react(control(3, refused))


def test_a_commit_of_another_step_is_none_of_its_business() -> None:
    stage = Stage()
    stage.react(CaughtUp())
    assert stage.react(control(3, committed(9, ()))) == []
    assert stage.machine.standing.step == 5


def test_who_is_asked_to_stop_ends_without_a_decision() -> None:
    stage = Stage()
    stage.react(CaughtUp(), StopAsked())
    assert stage.machine.finished
    assert stage.rounds == []


def test_where_it_stands_follows_from_the_rounds_in_the_log() -> None:
    stage = Stage()
    stage.react(CaughtUp())
    stage.react(BatchRead(take=take(5)))
    again = Standing(step=5, decided=4)
    for one in stage.rounds:
        again.round(one)
    assert again == stage.machine.standing
    assert (again.decided, again.ordinal) == (5, 0)
