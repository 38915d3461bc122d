"""Tests of user commands, valid and rejected."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.config.changes import LOGGED
from dora_pipe.config.logged import settings_in_force
from dora_pipe.config.objectives import BUILT_IN
from dora_pipe.schemas.rounds import Drain, End, StopRun
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage, unchanged


def running(**changes: Any) -> Stage:
    stage = Stage(**changes).begin()
    stage.worker("w0", slots=4)
    return stage


@pytest.mark.parametrize(
    ("verb", "args", "why"),
    [
        ("set", {}, "no setting given"),
        ("set", {"rollout__group_size": 4}, "rollout.group_size cannot change in a run"),
        ("set", {"trainer__learning_rate": -1.0}, "trainer.learning_rate"),
        ("set", {"staleness__async_batches": 0.5}, "no batch could fill"),
        ("set", {"run__steps": "many"}, "run.steps"),
        ("resume", {}, "neither paused"),
        ("pause", {"softly": True}, "takes no softly"),
        ("drain", {"worker": "w9"}, "unknown worker: w9"),
        ("stop", {"now": "yes"}, "true or false"),
        ("fail-batch", {}, "no batch is in training"),
        ("dance", {}, "unknown verb: dance"),
    ],
)
def test_wrong_command_says_why_and_changes_nothing(
    verb: str, args: dict[str, Any], why: str
) -> None:
    stage = running()
    before = stage.copy()
    stage.tell(records.command(verb, **args))
    assert why in stage.state.counters.rejection
    assert unchanged(before, stage.state)


def test_set_is_in_force_from_the_next_step_and_stands_in_the_batch() -> None:
    stage = running()
    stage.tell(records.command("set", trainer__learning_rate=0.5, objective__kl_coef=0.25))
    stage.finish_all()
    assert stage.batch is not None
    assert stage.batch.settings["trainer.learning_rate"] == 0.5
    assert stage.batch.settings["objective.kl_coef"] == 0.25
    used = {"objective.kind", *(f"objective.{name}" for name in BUILT_IN["grpo"].keys)}
    expected = used | {entry for entry in LOGGED if entry.startswith("trainer.")}
    assert set(stage.batch.settings) == expected == set(settings_in_force(stage.config, 0))


def test_batch_of_a_step_has_the_rate_of_that_step_and_set_changes_the_peak() -> None:
    stage = running(
        run__steps=4,
        trainer__learning_rate=0.5,
        trainer__schedule="linear",
        trainer__warmup_steps=2,
    )
    rates = []
    for step in range(4):
        stage.finish_all()
        if step == 2:
            stage.tell(records.command("set", trainer__learning_rate=4.0))
        assert stage.batch is not None
        rates.append(stage.batch.settings["trainer.learning_rate"])
        stage.commit()
        stage.settle()
    assert rates == [0.25, 0.5, 0.5, 2.0]


def test_steps_cannot_be_set_below_the_step_that_comes_next() -> None:
    stage = running()
    stage.finish_all()
    stage.commit()
    stage.settle()
    stage.finish_all()  # Step 1 trains.
    stage.tell(records.command("set", run__steps=1))
    assert "step 2 comes next" in stage.state.counters.rejection
    stage.tell(records.command("set", run__steps=2))
    ends = [decision for decision in stage.settle() if isinstance(decision, End)]
    assert {end.outcome for end in ends} == {"cancelled"}
    stage.commit()
    assert isinstance(stage.settle()[-1], StopRun)


def test_pause_admits_nothing_and_resume_does() -> None:
    stage = running()
    stage.tell(records.command("pause"))
    stage.tell(records.command("pause"))
    assert "already paused" in stage.state.counters.rejection
    count = stage.state.ordinal
    stage.finish_all()
    assert stage.state.ordinal == count
    assert stage.state.training is not None, "what is open goes on"
    stage.tell(records.command("resume"))
    stage.settle()
    assert stage.state.ordinal > count


def test_drain_lets_a_worker_finish_and_gives_it_nothing_more() -> None:
    stage = running()
    stage.worker("w1", slots=4)
    held = stage.running("w0")
    assert held
    stage.tell(records.command("drain", worker="w0"))
    (drain,) = [decision for decision in stage.plan() if isinstance(decision, Drain)]
    assert drain.worker == "w0"
    assert stage.running("w0") == held
    for name in held:
        stage.finish(name)
        stage.settle()
    assert stage.running("w0") == []
    stage.tell(records.left("w0", drain.incarnation))
    assert list(stage.state.workers) == ["w1"]
    stage.tell(records.command("drain"))
    assert [decision.worker for decision in stage.plan() if isinstance(decision, Drain)] == ["w1"]


def test_stop_trains_what_fills_whole_batches_and_cancels_the_latest_rest() -> None:
    stage = running(rollout__prompts_per_step=2, staleness__max_staleness=2, run__steps=9)
    stage.worker("w1", slots=4)
    stage.finish_group("g0000000000")
    stage.settle()
    count = len(stage.state.groups)
    assert count == 4
    stage.tell(records.command("set", staleness__async_batches=2.5))
    stage.settle()
    assert len(stage.state.groups) == 5
    stage.tell(records.command("stop"))
    ends = [decision for decision in stage.settle() if isinstance(decision, End)]
    assert [(end.group, end.outcome) for end in ends] == [("g0000000004", "cancelled")]
    assert "stop" in ends[0].reason
    stage.complete()
    assert stage.state.version == 2
    assert stage.state.counters.outcomes == {"trained": 4, "cancelled": 1}


def test_stop_now_ends_the_run_after_the_step_that_trains() -> None:
    stage = running(evaluation__prompts=2, evaluation__every=1)
    while stage.state.training is None:
        stage.finish(stage.running()[0])
        stage.settle()
    assert stage.state.groups
    stage.tell(records.command("stop", now=True))
    stage.settle()
    assert {group.phase for group in stage.state.groups.values()} == {"taken"}
    stage.commit()
    assert isinstance(stage.settle()[-1], StopRun)
    assert stage.state.version == 1


def test_stop_after_a_step_ends_the_run_when_that_step_is_committed() -> None:
    stage = running(run__steps=20, rollout__prompts_per_step=1)
    stage.tell(records.command("stop", after=2))
    for _ in range(10):
        stage.step()
    assert stage.state.done
    assert stage.state.version == 3, "steps 0, 1 and 2"
    assert stage.state.counters.outcomes == {"trained": 3}, "no group was begun in vain"


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"after": -2}, "step -2 has ended, the next step is 0"),
        ({"after": "soon"}, "`after` is a step"),
        ({"after": True}, "`after` is a step"),
        ({"after": 3, "now": True}, "without `now`"),
    ],
)
def test_stop_after_what_is_no_step_to_come_is_rejected(args: dict[str, Any], why: str) -> None:
    stage = running()
    before = stage.copy()
    stage.tell(records.command("stop", **args))
    assert why in stage.state.counters.rejection
    assert unchanged(before, stage.state)
