"""Tests of batches in parts: when taken, when given up."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.config.checks import problems_of
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import TakeBatch, TakePart
from tests.support import orchestrator_records as records
from tests.support.orchestrator_records import make_config
from tests.support.orchestrator_stage import Stage


def running(**changes: Any) -> Stage:
    plain = {
        "rollout__prompts_per_step": 4,
        "rollout__group_size": 1,
        "trainer__batch_parts": 4,
        "run__steps": 9,
    }
    stage = Stage(**{**plain, "staleness__max_staleness": 1, **changes}).begin()
    stage.worker("w0", slots=8)
    return stage


def name(ordinal: int) -> str:
    return f"g{ordinal:010}"


def finish(stage: Stage, *ordinals: int) -> list[TakePart | TakeBatch]:
    taken: list[TakePart | TakeBatch] = []
    for ordinal in ordinals:
        stage.finish_group(name(ordinal))
        taken += [entry for entry in stage.settle() if isinstance(entry, TakePart | TakeBatch)]
    return taken


def in_training(**changes: Any) -> tuple[Stage, TakePart]:
    stage = running(**changes)
    finish(stage, 0, 1, 2, 3)
    assert stage.state.training is not None
    (part,) = finish(stage, 4)
    assert isinstance(part, TakePart)
    return stage, part


@pytest.mark.parametrize("how", ["refused", "fail-batch", "set"])
def test_part_after_a_step_that_comes_to_nothing_is_given_up(how: str) -> None:
    stage, part = in_training()
    controls: dict[str, AnyControl] = {
        "refused": records.refused(0, [name(1)]),
        "fail-batch": records.command("fail-batch"),
        "set": records.command("set", trainer__learning_rate=0.5),
    }
    stage.tell(controls[how])
    assert stage.state.parts == []
    assert stage.state.deadlines == {1: 7 if how == "refused" else 4}
    assert stage.state.groups[part.groups[0].group].phase == "finished"
    stage.complete()
    assert stage.state.version == 9


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"part": 1}, "is the next part"),
        ({"step": 1}, "is not the next one"),
        ({"attempt": 2}, "is not the next one"),
        ({"groups": ()}, "not the next part"),
    ],
)
def test_part_that_no_plan_may_contain_is_refused(change: dict[str, Any], why: str) -> None:
    stage = running()
    finish(stage, 2)
    taken = stage.state.groups[name(2)].taken()
    stage.tell(records.command("set", trainer__learning_rate=0.5))
    due = TakePart(step=0, attempt=1, part=0, groups=(taken,), settings={}, reason="")
    changed = TakePart(**{**{key: getattr(due, key) for key in due.__struct_fields__}, **change})
    with pytest.raises(InvariantBroken, match=why):
        apply_decision(stage.state, changed)
    apply_decision(stage.state, due)
    assert stage.state.parts == [(name(2),)]


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"trainer__batch_parts": 5}, "more than rollout.prompts_per_step"),
        ({"trainer__minibatches": 3}, "3 updates must be 1 or one per part"),
        ({"objective__advantage": "version-baseline"}, "version-baseline compares"),
    ],
)
def test_what_parts_cannot_be_with_is_said_by_name(keys: dict[str, Any], why: str) -> None:
    plain = {"rollout__prompts_per_step": 4, "trainer__batch_parts": 2}
    assert any(why in problem.text for problem in problems_of(make_config(**{**plain, **keys})))


def test_as_many_updates_as_parts_are_taken_in_parts() -> None:
    plain: dict[str, Any] = {
        "rollout__prompts_per_step": 4,
        "trainer__batch_parts": 2,
        "trainer__minibatches": 2,
    }
    assert not [
        problem for problem in problems_of(make_config(**plain)) if "trainer" in problem.text
    ]
    stage = running(**plain)
    part, batch = finish(stage, 2, 0, 1, 3)
    assert isinstance(batch, TakeBatch)
    assert (type(part), batch.parts) == (TakePart, (2,))
