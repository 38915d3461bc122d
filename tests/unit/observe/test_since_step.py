"""Tests of reports of groups that ended without a step."""

from __future__ import annotations

from dora_pipe.ledger.account import RunAccount
from dora_pipe.observe.failed import BATCHES, GroupsSinceStep
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.identity import Purpose
from dora_pipe.schemas.rounds import End, Outcome, Round
from tests.support.catalogue_stage import HandwrittenRun

PER_STEP = 2
FEW = BATCHES * PER_STEP - 1
ADVICE = (
    ". If rewards never differ, rollout.filter_zero_advantage waits without end: change the reward"
    " or the data"
)


class UnfinishedRun(HandwrittenRun):
    def __init__(self) -> None:
        self.account, self.since = RunAccount(), GroupsSinceStep()
        super().__init__()

    def take_fact(self, offset: int, fact: AnyControl) -> None:
        for event in self.account.fact(offset, fact):
            self.since.happened(event)

    def take_round(self, round_: Round) -> None:
        for event in self.account.round(round_, round_.ordinal):
            self.since.happened(event)

    def end(
        self, outcome: Outcome, count: int, *, why: str = "", purpose: Purpose = "train"
    ) -> None:
        for _ in range(count):
            spec = self.spec(self.rounds, purpose=purpose)
            self.decide(self.dispatch(spec))
            self.decide(End(group=spec.group, outcome=outcome, reason=why))


def test_few_groups_are_not_worth_a_word() -> None:
    stage = UnfinishedRun()
    stage.end("filtered", FEW)
    assert stage.since.words(PER_STEP) == stage.since.words(None) == ""


def test_most_frequent_outcome_is_named_with_its_newest_reason() -> None:
    stage = UnfinishedRun()
    stage.end("filtered", FEW - 2, why="equal")
    stage.end("failed", 3, why="1 of 2 trajectories are not valid")
    assert stage.since.words(PER_STEP) == "no step after 8 groups: 5 filtered (equal)" + ADVICE
    stage.end("failed", 3, why="non-finite")
    assert stage.since.words(PER_STEP) == "no step after 11 groups: 6 failed (non-finite)"


def test_groups_that_a_stop_cancels_and_evaluations_do_not_count() -> None:
    stage = UnfinishedRun()
    stage.end("cancelled", 2 * FEW)
    stage.end("evaluated", 2 * FEW, purpose="eval")
    assert stage.since.count == 0
