"""Tests of batches in the fold: taken, committed, refused, failed, illegal."""

from __future__ import annotations

import msgspec
import pytest

from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.rounds import End, TakeBatch
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage


def in_training(**changes: object) -> Stage:
    stage = Stage(**changes).begin()
    stage.worker("w0", slots=4)
    for group in ("g0000000000", "g0000000001"):
        stage.finish_group(group)
    stage.plan()
    assert stage.state.training is not None
    return stage


def commit_of(stage: Stage) -> StepCommitted:
    assert stage.batch is not None
    return records.committed(stage.batch.step, stage.batch.groups, attempt=stage.batch.attempt)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step": 1}, "not in training"),
        ({"attempt": 2}, "not in training"),
        ({"incarnation": 3}, "incarnation"),
        ({"groups": ()}, "differs from the batch taken"),
        ({"batch_digest": "0" * 64}, "differs from the batch taken"),
        ({"digest_before": "0" * 64}, "other weights"),
        ({"digest_after": "0" * 64}, "other weights"),
    ],
)
def test_commit_of_anything_but_the_batch_in_training_is_rejected_and_changes_nothing(
    change: dict[str, object], why: str
) -> None:
    stage = in_training()
    before = stage.copy()
    stage.tell(msgspec.structs.replace(commit_of(stage), **change))
    assert stage.state.counters.rejected == before.counters.rejected + 1
    assert why in stage.state.counters.rejection
    stage.state.counters = before.counters
    assert stage.state.digest() == before.digest()


def test_commit_of_a_trainer_that_was_replaced_is_rejected() -> None:
    stage = in_training()
    stage.tell(records.role_started("trainer", 1))
    stage.tell(commit_of(stage))
    assert stage.state.version == 0
    stage.tell(msgspec.structs.replace(commit_of(stage), incarnation=1))
    assert stage.state.version == 1


@pytest.mark.parametrize(
    "record",
    [
        records.refused(0, []),
        records.refused(0, ["g0000000009"]),
        records.refused(0, ["g0000000000"], attempt=2),
        records.refused(1, ["g0000000000"]),
        records.refused(0, ["g0000000000"], incarnation=9),
    ],
)
def test_refusal_that_names_nothing_of_the_batch_is_rejected(record: object) -> None:
    stage = in_training()
    before = stage.copy()
    stage.tell(record)  # type: ignore[arg-type]
    assert stage.state.counters.rejected == 1
    stage.state.counters = before.counters
    assert stage.state.digest() == before.digest()


def test_training_to_failed_when_a_user_gives_a_batch_up() -> None:
    stage = in_training()
    stage.tell(records.command("fail-batch", step=3))
    assert stage.state.training is not None
    stage.tell(records.command("fail-batch", step=0))
    ends = [decision for decision in stage.settle() if isinstance(decision, End)]
    assert {(end.outcome, end.reason) for end in ends} == {("failed", "non-finite")}
    stage.finish_all()
    taken = [decision for decision in stage.decided if isinstance(decision, TakeBatch)]
    assert [(decision.step, decision.attempt) for decision in taken] == [(0, 1), (0, 2)]
    assert not {g.group for g in taken[0].groups} & {g.group for g in taken[1].groups}
