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
    facts = sorted(world.facts(TrajectoryLogged), key=lambda value: value.trajectory)
    taken = tuple(
        TakenTrajectory(
            trajectory=fact.trajectory,
            attempt=fact.attempt,
            incarnation=fact.incarnation,
            partition=fact.partition,
            offset=fact.offset,
            sha256=fact.sha256,
        )
        for fact in facts
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
    assert [sample.reward for sample in answer.samples] == [1.0, 2.0, 3.0]
    assert answer.samples[2].parts == {"place": 2.0}
    assert (answer.group, answer.attempt, answer.incarnation) == (
        "g0000000000",
        1,
        worker.setup.incarnation,
    )
    (call,) = [call for call in tasks.seen if isinstance(call, GroupCall)]
    indices = {name: trajectory.meta.index for name, trajectory in world.trajectories().items()}
    assert len(call.completions) == len(indices) == 3
    assert all(
        completion.turns == (completion.text,) and not completion.messages
        for completion in call.completions
    )


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("sha256", "0" * 64, "its bytes differ"),
        ("attempt", 2, "the record there is"),
        ("incarnation", 5, "the record there is"),
        ("offset", 0, "g0000000000-001"),
    ],
)
def test_a_record_that_is_not_the_one_meant_is_named_and_may_be_asked_again(
    field: str, value: object, text: str
) -> None:
    world = World()
    worker = world.start()
    question = logged(world, worker)
    first, second, third = question.trajectories
    wrong = msgspec.structs.replace(second, **{field: value})
    question = msgspec.structs.replace(question, trajectories=(first, wrong, third))
    (answer,) = answers(world, worker, question)
    assert answer.error.startswith("NotRead: ") and text in answer.error
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
    (wait,) = [wait for wait in worker.machine.waits(10**12) if wait.name == "group-score"]
    assert wait.key == "g0000000000"
    return world, worker, tasks


def test_who_is_stopped_leaves_at_once_and_puts_down_what_it_scores() -> None:
    world, worker, _ = hanging()
    world.stop(worker)
    assert len(world.facts(WorkerLeft)) == 1
    assert not world.facts(GroupScored) and not len(worker.machine.scorings)
