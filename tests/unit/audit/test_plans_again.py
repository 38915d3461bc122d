"""Tests of replanning from the log: equal plans, or the different round is named.

A virtual run contains every kind of decision; a forger changes one of each kind.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest

from dora_pipe.audit.check_fold import FoldCheck
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.round_reader import FoldedRound
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    Drain,
    End,
    Fence,
    Migrate,
    Round,
    Schedule,
    StopRun,
    TakeBatch,
)
from tests.support import orchestrator_records as records
from tests.support.ledgers import folded_rounds
from tests.support.orchestrator_world import Chances, World

SEED = 3
KINDS = (Dispatch, Schedule, Migrate, Cancel, Assign, Drain, Fence, TakeBatch, End, StopRun)


@cache
def turns() -> tuple[FoldedRound, ...]:
    config = records.make_config(
        run__steps=8,
        rollout__group_size=4,
        rollout__prompts_per_step=3,
        rollout__min_valid_trajectories=4,
        staleness__max_staleness=2,
    )
    chances = Chances(
        invalid=0.02, crash=0.01, restart=0.05, moves=True, token_s=0.5, train_s=3.0, load_s=0.1
    )
    workers = {f"w{number}": (4, 1) for number in range(6)}
    world = World(seed=SEED, config=config, workers=workers, chances=chances)
    world.run(seconds=40.0)
    world.tell(records.command("drain", worker="w1"))
    world.run(seconds=200.0)
    world.heal()
    world.run(seconds=5000.0)
    assert world.machine.state.done
    rounds = tuple(folded_rounds(world.bus, world.topics, Findings()))
    decided = {type(decision) for turn in rounds if turn.round for decision in turn.round.decisions}
    assert decided == set(KINDS)
    return rounds


def check(rounds: list[FoldedRound]) -> tuple[FoldCheck, Findings]:
    findings = Findings()
    fold = FoldCheck(findings)
    for turn in rounds:
        fold.fold(turn)
    return fold, findings


def forged(index: int, round_: Round) -> list[FoldedRound]:
    actual_turns = list(turns())
    actual_turns[index] = FoldedRound(
        offset=actual_turns[index].offset, round=round_, facts=actual_turns[index].facts
    )
    return actual_turns


def rounds_with(kind: type[Any]) -> list[tuple[int, Round, int]]:
    return [
        (index, turn.round, number)
        for index, turn in enumerate(turns())
        if turn.round is not None
        for number, decision in enumerate(turn.round.decisions)
        if isinstance(decision, kind)
    ]


def with_decisions(round_: Round, decisions: list[AnyDecision]) -> Round:
    return msgspec.structs.replace(round_, decisions=tuple(decisions))


def test_every_plan_of_a_run_is_made_again_and_is_equal() -> None:
    fold, findings = check(list(turns()))
    assert findings.violations == []
    assert fold.plans > 100
    assert fold.plans <= findings.looked["rounds"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_decision_that_says_another_reason_is_named(kind: type[Any]) -> None:
    index, round_, number = rounds_with(kind)[0]
    decisions = list(round_.decisions)
    decisions[number] = msgspec.structs.replace(decisions[number], reason="a forger's")
    _, findings = check(forged(index, with_decisions(round_, decisions)))
    (first, *_) = findings.violations
    assert (first.check, first.subject) == ("decisions", f"round {round_.ordinal}")
    assert "a forger's" in first.found and first.expected


@pytest.mark.parametrize("kind", [entry for entry in KINDS if entry is not StopRun])
def test_a_decision_that_was_taken_out_is_named(kind: type[Any]) -> None:
    index, round_, number = rounds_with(kind)[-1]
    decisions = [decision for index, decision in enumerate(round_.decisions) if index != number]
    _, findings = check(forged(index, with_decisions(round_, decisions)))
    assert ("decisions", f"round {round_.ordinal}") in {
        (violation.check, violation.subject) for violation in findings.violations
    }


def test_after_a_plan_that_differs_the_later_ones_are_still_made_again() -> None:
    index, round_, number = rounds_with(Migrate)[0]
    decisions = list(round_.decisions)
    decisions[number] = msgspec.structs.replace(decisions[number], reason="a forger's")
    fold, findings = check(forged(index, with_decisions(round_, decisions)))
    named = [
        violation.subject for violation in findings.violations if violation.check == "decisions"
    ]
    assert named == [f"round {round_.ordinal}"]
    assert fold.plans == check(list(turns()))[0].plans - 1


def planned_by(planner: str) -> list[FoldedRound]:
    actual_turns = list(turns())
    first = actual_turns[0]
    facts = []
    for fact in first.facts:
        if isinstance(fact.record, RunStarted):
            record = msgspec.structs.replace(fact.record, planner=planner)
            fact = type(fact)(offset=fact.offset, key=fact.key, value=fact.value, record=record)
        facts.append(fact)
    actual_turns[0] = FoldedRound(offset=first.offset, round=first.round, facts=tuple(facts))
    return actual_turns


def test_plans_of_another_planner_are_not_made_again_and_audit_says_so() -> None:
    fold, findings = check(planned_by("elsewhere-9"))
    assert fold.plans == 0 and findings.violations == []
    (note,) = findings.notes
    assert "elsewhere-9" in note and PLANNER in note
