"""Groups whose siblings are scored together: when they are asked about, and what answers do."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from dora_pipe.config.checks import round_bytes
from dora_pipe.config.model import RewardUse
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.planner import plan, size_of
from dora_pipe.orchestrator.scoring import GROUPS_MAX
from dora_pipe.orchestrator.snapshots import body_of, state_of
from dora_pipe.orchestrator.waits import blockers, waits
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import TakenGroup
from dora_pipe.schemas.rounds import Drain, End, Fence, ScoreGroup, TakeBatch
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage

G0 = "g0000000000"


def stage_of(*workers: str, **changes: object) -> Stage:
    """A run of groups that are scored together, with these workers."""
    stage = Stage(**changes).begin(together=("train", "eval"))
    for name in workers or ("w0",):
        stage.worker(name)
    return stage


def asked(stage: Stage, group: str = G0) -> ScoreGroup:
    """The newest question about a group."""
    found = (one for one in reversed(stage.decided) if isinstance(one, ScoreGroup))
    return next(one for one in found if one.spec.group == group)


def complete(stage: Stage, group: str = G0, *rewards: float | None) -> ScoreGroup:
    """All siblings of a group end, with these rewards; the question about it."""
    for sibling, reward in enumerate(rewards or (1.0, 1.0)):
        stage.finish(f"{group}-{sibling:03}", reward=reward)
    stage.settle()
    return asked(stage, group)


def ended(stage: Stage, group: str = G0) -> End:
    found = (one for one in stage.decided if isinstance(one, End))
    return next(one for one in found if one.group == group)


def test_a_group_is_asked_about_when_its_last_sibling_has_ended_and_holds_no_slot() -> None:
    stage = stage_of()
    stage.finish(f"{G0}-000")
    stage.settle()
    assert not stage.state.scoring
    stage.finish(f"{G0}-001")
    stage.settle()
    question = asked(stage)
    group = stage.state.groups[G0]
    assert (group.phase, question.attempt, question.worker) == ("scoring", 1, "w0")
    assert [one.trajectory for one in question.trajectories] == [f"{G0}-000", f"{G0}-001"]
    assert not [name for name in stage.state.workers["w0"].requests if name.startswith(G0)]
    assert plan(stage.state) == ()


def test_it_is_in_u_with_its_deadline_until_it_is_scored_and_named_by_who_waits() -> None:
    stage = stage_of()
    question = complete(stage)
    before = dict(stage.state.deadlines)
    assert sum(before.values()) == len(stage.state.groups)
    assert G0 in stage.state.index.generating[question.spec.deadline]
    assert G0 in [one.spec.group for one in blockers(stage.state, 9).first]
    assert any("scored together" in one.words for one in waits(stage.state))
    stage.tell(records.scored(question, (1.5, 0.5)))
    assert stage.state.deadlines == before
    assert [one.group for one in stage.state.finished] == [G0]


def test_the_rewards_of_the_answer_are_what_a_batch_is_taken_with() -> None:
    stage = stage_of(groups__per_step=1)
    stage.tell(records.scored(complete(stage), (1.5, 0.5)))
    stage.settle()
    assert stage.batch is not None
    (taken,) = stage.batch.groups
    assert taken.rewards == {f"{G0}-000": 1.5, f"{G0}-001": 0.5}
    assert stage.state.training is not None
    assert stage.state.training.digest == batch_digest(stage.batch.groups)


def test_siblings_without_a_reward_are_not_asked_about_and_have_none_after() -> None:
    stage = stage_of(groups__min_valid_siblings=1)
    question = complete(stage, G0, None, 1.0)
    assert [one.trajectory for one in question.trajectories] == [f"{G0}-001"]
    stage.tell(records.scored(question, (0.25,)))
    assert stage.state.groups[G0].taken().rewards == {f"{G0}-001": 0.25}


@pytest.mark.parametrize(
    ("rewards", "fate"), [((0.5, 0.5), "filtered"), ((0.5, 1.0), None)], ids=["equal", "unequal"]
)
def test_whether_it_is_filtered_is_asked_of_the_scores_not_of_the_records(
    rewards: tuple[float, ...], fate: str | None
) -> None:
    stage = stage_of(groups__filter_zero_advantage=True)
    stage.tell(records.scored(complete(stage), rewards))
    stage.settle()
    found = [one.fate for one in stage.decided if isinstance(one, End) and one.group == G0]
    assert found == ([fate] if fate else [])


def test_an_attempt_that_may_be_asked_again_is_boundedly_often_and_then_the_group_fails() -> None:
    stage = stage_of(groups__attempts_max=3)
    question = complete(stage)
    for attempt in (1, 2, 3):
        assert question.attempt == attempt
        stage.tell(records.scored(question, error="Retry: busy", retryable=True))
        stage.settle()
        question = asked(stage)
    assert question.attempt == 3
    assert ended(stage).fate == "failed"
    assert G0 not in stage.state.scoring


def test_what_the_tasks_code_raised_is_not_asked_again() -> None:
    stage = stage_of()
    stage.tell(records.scored(complete(stage), error="KeyError: 'answr'"))
    stage.settle()
    assert ended(stage).fate == "failed"
    assert stage.state.failures.failed[-1].error == "KeyError: 'answr'"


def test_an_evaluation_that_is_not_scored_has_no_valid_reward() -> None:
    stage = Stage(evaluation__prompts=1, evaluation__siblings=2, evaluation__every=1)
    stage.begin(together=("eval",)).worker("w0", slots=8)
    question = complete(stage, "e0000000000")
    stage.tell(records.scored(question, error="KeyError: 'answr'"))
    stage.settle()
    end = ended(stage, "e0000000000")
    assert end.fate == "evaluated" and "no valid reward" in end.reason


@pytest.mark.parametrize("orderly", [True, False])
def test_a_worker_that_goes_is_replaced_and_only_its_loss_counts(orderly: bool) -> None:
    stage = stage_of("w0", "w1")
    first = complete(stage)
    if orderly:
        stage.tell(records.left(first.worker, first.epoch))
    else:
        stage.lose(first.worker)
    stage.settle()
    again = asked(stage)
    assert (again.attempt, again.worker != first.worker) == (2, True)
    assert stage.state.scoring[G0].faults == (not orderly)
    stage.tell(records.scored(first, (9.0, 9.0)))
    assert stage.state.groups[G0].phase == "scoring"
    stage.tell(records.scored(again, (1.5, 0.5)))
    assert stage.state.groups[G0].taken().rewards[f"{G0}-000"] == 1.5
    stage.tell(records.scored(again, (7.0, 7.0)))
    assert stage.state.groups[G0].taken().rewards[f"{G0}-000"] == 1.5
    assert stage.state.counters.superseded == 1


def test_an_answer_about_other_siblings_or_without_bounds_is_rejected() -> None:
    stage = stage_of()
    question = complete(stage)
    answer = records.scored(question, (1.0, float("1e9")))
    stage.tell(answer)
    assert "beyond" in stage.state.counters.rejection
    answer = records.scored(question, (1.0, 1.0))
    stage.tell(msgspec.structs.replace(answer, siblings=answer.siblings[:1]))
    assert "other siblings" in stage.state.counters.rejection
    assert stage.state.groups[G0].phase == "scoring"


def test_a_question_costs_a_plan_as_much_as_it_has_siblings() -> None:
    assert size_of([complete(stage_of())]) == 2


def test_the_largest_round_has_room_for_what_a_batch_was_scored() -> None:
    plain = records.make_config()
    task = replace(plain.task, rewards=(RewardUse(use="mine:rank", group=True),))
    more = round_bytes(replace(plain, task=task)) - round_bytes(plain)
    rewards = {f"g9999999999-{at:03}": -1e6 / 3 for at in range(4)}
    bare = TakenGroup(group="g", version=0, deadline=1, trajectories=())
    assert more >= len(encode(replace(bare, rewards=rewards))) - len(encode(bare)) - 16


def test_a_worker_that_drains_is_not_asked() -> None:
    stage = stage_of("w0", "w1")
    stage.tell(records.command("drain", worker="w0"))
    stage.settle()
    assert any(isinstance(one, Drain) for one in stage.decided)
    assert complete(stage).worker == "w1"


def test_a_worker_scores_a_bounded_number_of_groups_at_a_time() -> None:
    many = GROUPS_MAX + 4
    stage = Stage(groups__size=1, groups__per_step=many, staleness__max_staleness=2).begin(
        together=("train",)
    )
    stage.worker("w0", slots=many)
    for name in stage.running():
        stage.finish(name)
    stage.settle()
    questions = [one for one in stage.decided if isinstance(one, ScoreGroup)]
    assert len(questions) == GROUPS_MAX
    stage.tell(records.scored(questions[0], (1.0,)))
    stage.settle()
    assert len([one for one in stage.decided if isinstance(one, ScoreGroup)]) == GROUPS_MAX + 1


def test_a_group_is_not_asked_about_again_nor_otherwise() -> None:
    stage = stage_of("w0", "w1")
    question = complete(stage)
    with pytest.raises(InvariantBroken, match="does not wait to be scored"):
        apply_decision(stage.state, question)
    stage.tell(records.scored(question, error="Retry: busy", retryable=True))
    with pytest.raises(InvariantBroken, match="not the next attempt"):
        apply_decision(stage.state, question)


def test_a_snapshot_keeps_what_is_being_scored_and_the_digest_covers_it() -> None:
    stage = stage_of()
    before = digest_of(stage.state)
    question = complete(stage)
    assert digest_of(stage.state) != before
    again = state_of(body_of(stage.state).joined())
    assert digest_of(again) == digest_of(stage.state) == stage.state.digest()
    assert again.scoring == stage.state.scoring
    assert again.index.generating.keys() == stage.state.index.generating.keys()
    assert question.spec.group in again.scoring


def test_a_group_that_no_step_is_left_for_is_cancelled_while_it_is_scored() -> None:
    stage = stage_of(groups__per_step=1, run__steps=4)
    question = complete(stage, "g0000000001")
    stage.tell(records.command("stop", step=0))
    stage.settle()
    stage.tell(records.scored(question, (1.0, 0.0)))
    assert question.spec.group not in stage.state.scoring


def test_nothing_of_it_is_said_where_nothing_is_scored_together() -> None:
    stage = Stage(groups__per_step=1).begin()
    stage.worker("w0")
    stage.finish_all()
    kinds = {type(one) for one in stage.decided}
    assert ScoreGroup not in kinds and TakeBatch in kinds and Fence not in kinds
    assert stage.batch is not None and not stage.batch.groups[0].rewards
