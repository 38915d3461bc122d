"""Tests of the reasons why a run waits."""

from __future__ import annotations

import pytest

from dora_pipe.orchestrator.entities import Worker
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.waits import admission_limit, blocking_groups, waits
from dora_pipe.schemas.metrics import Blocker
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage


def waits_for(state: State) -> str:
    return "".join(wait.words for wait in waits(state) if wait.still)


def test_every_phase_of_a_run_has_its_words() -> None:
    assert waits_for(State()) == "the start of the run"
    stage = Stage(run__steps=1, rollout__prompts_per_step=1).begin()
    assert waits_for(stage.state) == "a worker"
    stage.tell(records.joined("w0", assets="0" * 64))
    assert "rejected: worker-joined" in waits_for(stage.state)
    stage.worker("w0", slots=1)
    assert waits_for(stage.state) == "groups g0000000000 (version 0, 2 of 2 open)"
    stage.finish(stage.running()[0])
    stage.plan()
    assert waits_for(stage.state) == "groups g0000000000 (version 0, 1 of 2 open)"
    stage.finish_all()
    assert waits_for(stage.state) == "the trainer: step 0, attempt 1"
    stage.commit()
    stage.settle()
    assert waits_for(stage.state) == ""


def test_only_the_groups_that_block_the_step_are_named() -> None:
    stage = Stage(
        rollout__prompts_per_step=1, rollout__group_size=1, staleness__max_staleness=1
    ).begin()
    stage.worker("w0", slots=1)
    stage.worker("w1", slots=1)
    stage.finish("g0000000000-000")
    stage.settle()
    stage.commit()
    stage.settle()
    # b (version 0) is running; c (version 1) finishes first and must not precede it.
    stage.finish("g0000000002-000")
    stage.settle()
    assert stage.state.training is None
    groups, count = blocking_groups(stage.state, 4)
    assert ([group.spec.group for group in groups], count) == (["g0000000001"], 1)
    assert waits_for(stage.state) == "groups g0000000001 (version 0, 1 of 1 open)"


def test_at_the_end_the_evaluation_that_is_open_is_named() -> None:
    stage = Stage(run__steps=1, rollout__prompts_per_step=1, evaluation__prompts=1).begin()
    stage.worker("w0", slots=4)
    stage.finish_all()
    stage.commit()
    stage.settle()
    assert waits_for(stage.state) == "groups e0000000001 (version 1, 1 of 1 open)"


def test_waits_name_whose_turn_it_is_as_typed_blockers() -> None:
    stage = Stage(run__steps=2, rollout__prompts_per_step=1).begin()
    stage.worker("w0", slots=1)
    (groups,) = waits(stage.state)
    assert (groups.name, groups.key, groups.limit) == ("groups", "0", "work")
    assert list(groups.blockers) == [Blocker("group", "g0000000000")]
    stage.finish_all()
    (trainer,) = waits(stage.state, since_ns=7)
    assert (trainer.name, trainer.since_ns) == ("trainer", 7)
    assert list(trainer.blockers) == [Blocker("role", "trainer"), Blocker("step", "0")]


def test_pause_may_last_and_a_missing_worker_may_not() -> None:
    stage = Stage(rollout__prompts_per_step=1, rollout__group_size=1).begin()
    (worker,) = waits(stage.state)
    assert (worker.name, worker.limit) == ("worker", "short")
    stage.tell(records.command("pause"))
    stage.worker("w0", slots=1)
    stage.settle()
    (pause,) = waits(stage.state)
    assert (pause.name, pause.limit) == ("pause", "free")
    assert list(pause.blockers) == [Blocker("user", "resume")]


def test_queued_version_that_nobody_hosts_is_a_wait_of_its_own() -> None:
    stage = Stage(rollout__prompts_per_step=1, rollout__group_size=2).begin()
    stage.worker("w0", slots=1)
    assert [wait.name for wait in waits(stage.state)] == ["groups"]
    stage.lose("w0")
    assert stage.state.queues
    # A present worker that is assigned nothing of it.
    stage.state.workers["w1"] = Worker(name="w1", incarnation=99, slots=1, prefetch=0)
    results = {wait.name: wait for wait in waits(stage.state)}
    assert list(results["host"].blockers) == [Blocker("version", "0")]
    assert not results["host"].still


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"async_batches": 1.5}, "staleness.async_batches = 1.5 lets 3 groups be open"),
        ({"async_batches": 9.0}, "staleness.max_staleness = 1: 4 groups are due by step 1"),
    ],
)
def test_setting_that_keeps_workers_idle_is_named(settings: dict[str, float], limit: str) -> None:
    changes = {f"staleness__{name}": value for name, value in settings.items()}
    stage = Stage(
        rollout__prompts_per_step=2, rollout__group_size=1, staleness__max_staleness=1, **changes
    ).begin()
    stage.worker("w0", slots=1)
    assert admission_limit(stage.state) == ""
    stage.worker("w1", slots=64)
    assert admission_limit(stage.state) == limit
    stage.tell(records.command("pause"))
    assert admission_limit(stage.state) == ""
