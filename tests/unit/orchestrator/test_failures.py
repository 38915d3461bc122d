"""Tests of runs that stop after failing groups, and resume."""

from __future__ import annotations

import pytest

from dora_pipe.config.model import Rollout
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.failures import FIRST_MIN, WINDOW_MIN, Failures, halt_due, note
from dora_pipe.orchestrator.waits import waits
from dora_pipe.schemas.control import LoggedEntry, TrajectoriesLogged
from dora_pipe.schemas.rounds import Dispatch, Halt
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage

TYPO = "KeyError: 'answr'"
B = 4
FIRST = max(FIRST_MIN, 2 * B)


def running(**changes: object) -> Stage:
    stage = Stage(
        rollout__prompts_per_step=B, rollout__group_size=2, run__steps=50, **changes
    ).begin()
    stage.worker("w0", slots=8)
    return stage


def end_invalid(stage: Stage, name: str, error: str = TYPO) -> None:
    request = stage.placed[name]
    entry = LoggedEntry(
        trajectory=name,
        attempt=request.attempt,
        partition=request.spec.partition,
        offset=stage.offset,
        sha256="0" * 64,
        bytes=1,
        tokens=1,
        reward=None,
        finish="stop",
        error=error,
    )
    record = TrajectoriesLogged(
        at_ns=0,
        worker=request.worker,
        incarnation=request.incarnation,
        version=request.spec.version,
        digest=request.spec.digest,
        trajectories=(entry,),
    )
    stage.tell(record)


def fail_until_halted(stage: Stage, error: str = TYPO, *, turns: int = 100) -> Halt | None:
    for _ in range(turns):
        for name in stage.running():
            if name in stage.state.requests:
                end_invalid(stage, name, error)
        for decision in stage.settle():
            if isinstance(decision, Halt):
                return decision
    return None


def test_run_halts_when_the_first_two_batches_of_groups_have_failed() -> None:
    stage = running()
    halt = fail_until_halted(stage)
    assert halt is not None
    assert (halt.error, stage.state.counters.outcomes) == (TYPO, {"failed": FIRST})
    assert halt.trajectory in stage.placed
    assert f"all of the last {FIRST} groups" in halt.reason
    assert TYPO in halt.reason and halt.trajectory in halt.reason


def test_a_halted_run_decides_nothing_more_and_says_whom_it_waits_for() -> None:
    stage = running()
    fail_until_halted(stage)
    for name in stage.running():
        stage.finish(name)
    assert stage.plan() == []
    assert not stage.state.done
    (wait,) = [wait for wait in waits(stage.state) if wait.still]
    assert (wait.name, wait.blockers[0].id) == ("halted", "resume")


def test_later_the_share_of_the_window_decides() -> None:
    rules = Rollout(prompts_per_step=2, max_failed_share=0.5)
    failures = Failures()
    for index in range(1, 2 * WINDOW_MIN + 1):
        if index > WINDOW_MIN and index % 4:
            failures = note(
                failures, rules, ended_groups=index, error="E: x", trajectory=f"t{index}"
            )
        halt = halt_due(failures, rules, ended_groups=index)
        if halt is not None:
            break
    in_window = [entry for entry in failures.failed if entry.at > index - WINDOW_MIN]
    assert len(in_window) == WINDOW_MIN // 2 + 1
    assert len(failures.failed) <= WINDOW_MIN


def test_resume_lets_a_halted_run_go_on_and_counts_anew() -> None:
    stage = running()
    fail_until_halted(stage)
    before = len([decision for decision in stage.decided if isinstance(decision, Dispatch)])
    stage.tell(records.command("resume"))
    stage.settle()
    assert len([decision for decision in stage.decided if isinstance(decision, Dispatch)]) > before
    stage.finish_all()
    stage.commit()
    assert stage.state.version == 1
    again = running()
    fail_until_halted(again)
    again.tell(records.command("resume"))
    assert fail_until_halted(again, "TypeError: no") is not None
    assert again.state.counters.outcomes["failed"] == 2 * FIRST


def test_a_halt_that_is_not_due_or_says_another_error_is_refused() -> None:
    forged = Halt(reason="r", error="E", trajectory="t")
    stage = running()
    with pytest.raises(InvariantBroken, match="fewer groups have failed"):
        apply_decision(stage.state, forged)
    assert stage.state.failures == Failures()
