"""Which groups of a run have ended, and that their batches come out again as they were.

Method: runs of the planner itself, drawn by hypothesis, whose records and rounds lie in a log.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.audit.ended_groups import ended_groups
from dora_pipe.audit.taken_again import EndedGroups, taken_again
from dora_pipe.bus.port import Append
from dora_pipe.consumers.trainer.changed_batch import UNCHANGED
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.control import TakenGroup
from tests.support import orchestrator_records as records
from tests.support.logged_stage import LoggedStage

STEPS = 6
KINDS: list[dict[str, Any]] = [
    {},
    {"trainer__parts": 2, "groups__per_step": 4},
    {"groups__spare": 1},
    {"staleness__interruptible": True},
    {"staleness__max_staleness": 0},
]


def running(**changes: Any) -> LoggedStage:
    plain = {"run__steps": STEPS, "groups__filter_zero_advantage": True, "groups__size": 2}
    stage = LoggedStage(**{**plain, "staleness__max_staleness": 2, **changes})
    stage.begin(rows=60)
    stage.worker("w0", slots=6)
    return stage


def name(ordinal: int) -> str:
    return f"g{ordinal:010}"


def found(stage: LoggedStage, first: int = 0, rounds: int | None = None) -> EndedGroups:
    return ended_groups(stage.bus, stage.topics, first=first, last=STEPS - 1, rounds=rounds)


def again(stage: LoggedStage, first: int = 0) -> list[tuple[tuple[TakenGroup, ...], object]]:
    rules, parts = stage.config.groups, stage.config.trainer.parts
    batches = taken_again(found(stage, first), rules, UNCHANGED, parts=parts)
    return [(one.groups, one.parts) for one in batches]


def let_it_run(stage: LoggedStage, chance: Random, turns: int = 150) -> None:
    """Siblings end in any order; batches are committed, some refused; a worker is lost and joins
    again."""
    for _ in range(turns):
        open_ones, training = stage.running(), stage.state.training
        if stage.state.done:
            return
        if open_ones and chance.random() < 0.7:
            reward = chance.choice([0.0, 1.0, 0.0, 1.0, None])
            stage.finish(chance.choice(open_ones), reward=reward)
        elif training is not None and chance.random() < 0.2:
            group = chance.choice(training.groups)
            stage.tell(records.refused(training.step, [group], attempt=training.attempt))
        elif training is not None:
            stage.commit()
        elif chance.random() < 0.1 and stage.state.workers:
            stage.lose("w0")
            stage.settle()
            stage.worker("w0", slots=6)
        stage.settle()


@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.integers(0, STEPS - 1))
@settings(max_examples=20, deadline=None)
def test_unchanged_rewards_and_rules_give_the_very_batches_of_the_source(
    seed: int, kind: dict[str, Any], first: int
) -> None:
    stage = running(**kind)
    let_it_run(stage, Random(seed))
    theirs = [stage.taken[step] for step in range(first, stage.state.version)]
    assert again(stage, first) == [(one.groups, one.parts) for one in theirs]


def test_filtered_and_failed_groups_are_there_with_the_rewards_that_they_had() -> None:
    stage = running(groups__per_step=4, groups__min_valid_siblings=2)
    stage.finish_group(name(0))
    stage.finish(f"{name(1)}-000", reward=None)
    stage.settle()
    groups = {one.taken.group: one for one in found(stage).groups}
    assert groups.keys() == {name(0), name(1)}
    assert groups[name(0)].rewards == {f"{name(0)}-000": 1.0, f"{name(0)}-001": 1.0}
    assert groups[name(1)].rewards == {f"{name(1)}-000": None}
    assert [one.step for one in groups.values()] == [None, None]


def two_groups_trained(**changes: Any) -> LoggedStage:
    """Two groups that differ in reward, in the batch of step 0."""
    stage = running(groups__per_step=2, **changes)
    for ordinal in (0, 1):
        stage.finish(f"{name(ordinal)}-000", reward=1.0)
        stage.finish(f"{name(ordinal)}-001", reward=0.0)
    stage.settle()
    return stage


def test_groups_that_were_open_when_the_reading_ended_are_left_out() -> None:
    stage = two_groups_trained()
    assert found(stage).groups == []
    stage.commit()
    stage.settle()
    there = found(stage)
    assert [one.taken.group for one in there.groups] == [name(0), name(1)]
    assert [one.step for one in there.steps] == [0]


def test_what_was_read_before_is_read_again_whatever_came_after_it() -> None:
    stage = two_groups_trained()
    stage.commit()
    stage.settle()
    there = found(stage)
    stage.finish_group(name(2))
    stage.settle()
    assert len(found(stage).groups) == 3
    assert found(stage, rounds=there.rounds) == there


def test_a_group_that_the_trainer_refused_is_left_out() -> None:
    stage = two_groups_trained()
    stage.tell(records.refused(0, [name(0)]))
    stage.settle()
    stage.finish(f"{name(2)}-000", reward=1.0)
    stage.finish(f"{name(2)}-001", reward=0.0)
    stage.settle()
    stage.commit()
    stage.settle()
    assert [one.taken.group for one in found(stage).groups] == [name(1), name(2)]


def test_groups_that_no_step_can_take_are_not_kept() -> None:
    stage = two_groups_trained(staleness__max_staleness=0)
    stage.commit()
    stage.settle()
    assert len(found(stage, first=0).groups) == 2
    assert found(stage, first=1).groups == []


def test_a_log_that_does_not_hold_is_one_clear_line() -> None:
    stage = two_groups_trained()
    stage._writer.append([Append(topic=stage.topics.decisions, value=b"{}")])
    with pytest.raises(InvariantBroken, match="batches of tiny cannot be taken again: decisions"):
        found(stage)
