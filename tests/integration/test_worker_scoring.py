"""A worker that scores groups: it reads the records, checks them, asks the task, and answers."""

from __future__ import annotations

import msgspec
import pytest

from dora_pipe.producers.tasks.calls import GroupCall, GroupRewarded, TaskFailed
from dora_pipe.schemas.control import GroupScored, TakenTrajectory, TrajectoryLogged, WorkerLeft
from dora_pipe.schemas.rounds import ScoreGroup
from tests.support.inline_tasks import InlineTasks, failed
from tests.support.worker import Worker, World, spec_of


def logged(world: World, worker: Worker, samples: int = 3) -> ScoreGroup:
    places = [world.place(worker, 0, sample=sample) for sample in range(samples)]
    world.decide(*places)
    world.until_idle(worker)
    facts = sorted(world.facts(TrajectoryLogged), key=lambda one: one.trajectory)
    taken = tuple(
        TakenTrajectory(
            trajectory=one.trajectory,
            attempt=one.attempt,
            incarnation=one.incarnation,
            partition=one.partition,
            offset=one.offset,
            sha256=one.sha256,
        )
        for one in facts
    )
    return ScoreGroup(
        spec=spec_of(0),
        worker=worker.setup.worker,
        incarnation=worker.setup.incarnation,
        attempt=1,
        trajectories=taken,
        reason="all have ended",
    )


def answers(world: World, worker: Worker, question: ScoreGroup) -> list[GroupScored]:
    world.decide(question)
    world.ticks(worker, 12)
    return world.facts(GroupScored)


def test_rewards_are_those_of_the_records_and_what_the_group_adds() -> None:
    world, tasks = World(), InlineTasks()
    worker = world.start(tasks=tasks)
    question = logged(world, worker)
    (answer,) = answers(world, worker, question)
    assert [one.reward for one in answer.samples] == [1.0, 2.0, 3.0]
    assert answer.samples[2].parts == {"place": 2.0}
    assert (answer.group, answer.attempt, answer.incarnation) == (
        "g0000000000",
        1,
        worker.setup.incarnation,
    )
    (call,) = [one for one in tasks.seen if isinstance(one, GroupCall)]
    texts = {name: one.meta.index for name, one in world.trajectories().items()}
    assert len(call.completions) == len(texts) == 3
    assert all(one.turns == (one.text,) and one.turn is None for one in call.completions)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("sha256", "0" * 64, "its bytes differ"),
        ("attempt", 2, "the record there is"),
        ("incarnation", 5, "the record there is"),
        ("offset", 0, "g0000000000-001"),
    ],
)
def test_a_record_that_is_not_the_one_meant_is_named_and_may_be_asked_again(
    field: str, value: object, said: str
) -> None:
    world = World()
    worker = world.start()
    question = logged(world, worker)
    first, second, third = question.trajectories
    wrong = msgspec.structs.replace(second, **{field: value})
    question = msgspec.structs.replace(question, trajectories=(first, wrong, third))
    (answer,) = answers(world, worker, question)
    assert answer.error.startswith("NotRead: ") and said in answer.error
    assert answer.retryable and not answer.samples


@pytest.mark.parametrize(("error", "retryable"), [("Retry", True), ("ValueError", False)])
def test_what_the_task_fails_with_says_whether_it_may_be_asked_again(
    error: str, retryable: bool
) -> None:
    world = World()
    tasks = InlineTasks(group=lambda call: failed(call, error, "no"))
    worker = world.start(tasks=tasks)
    (answer,) = answers(world, worker, logged(world, worker))
    assert (answer.error, answer.retryable) == (f"{error}: no", retryable)


def test_a_reward_beyond_what_is_trained_is_an_error() -> None:
    def beyond(call: GroupCall) -> GroupRewarded | TaskFailed:
        return GroupRewarded(request=call.request, rewards=(1e6, 0.0, 0.0), parts=({},) * 3)

    world = World()
    worker = world.start(tasks=InlineTasks(group=beyond))
    (answer,) = answers(world, worker, logged(world, worker))
    assert answer.error.startswith("NoAnswer: the reward of g0000000000-000 is beyond")


def hanging() -> tuple[World, Worker, InlineTasks]:
    world, tasks = World(), InlineTasks(held={GroupCall})
    worker = world.start(tasks=tasks)
    assert answers(world, worker, logged(world, worker)) == []
    (wait,) = [one for one in worker.machine.waits(10**12) if one.name == "group-score"]
    assert wait.key == "g0000000000"
    return world, worker, tasks


def test_who_is_stopped_leaves_at_once_and_puts_down_what_it_scores() -> None:
    world, worker, _ = hanging()
    world.stop(worker)
    assert len(world.facts(WorkerLeft)) == 1
    assert not world.facts(GroupScored) and not len(worker.machine.scorings)
