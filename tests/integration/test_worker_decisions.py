"""Tests of decisions that a worker obeys or rejects, and of late cancellations."""

from __future__ import annotations

import pytest

from dora_pipe.producers.tasks.calls import PromptCall, RewardCall
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import RequestFailed, TrajectoryLogged, WorkerReady
from dora_pipe.schemas.rounds import Fence
from tests.support.inline_tasks import InlineTasks
from tests.support.worker import TOPICS, World, digest_of


def test_target_is_loaded_only_when_requests_of_the_served_version_are_done() -> None:
    world = World(lengths=lambda seed, turn: 30)
    worker = world.start(slots=1)
    world.decide(world.place(worker, 0), world.place(worker, 1))
    world.ticks(worker, 5)
    world.decide(world.assign(worker, 1), world.place(worker, 2, version=1))
    world.until_idle(worker)
    logged = {fact.trajectory: fact.version for fact in world.facts(TrajectoryLogged)}
    assert logged == {"g0000000000-000": 0, "g0000000001-000": 0, "g0000000002-000": 1}
    assert [ready.version for ready in world.facts(WorkerReady)] == [0, 1]
    assert world.trajectories()["g0000000002-000"].digest == digest_of(1)


def test_placement_of_another_version_than_the_target_is_refused_and_named() -> None:
    world = World()
    worker = world.start()
    world.decide(world.place(worker, 0, version=1))
    world.ticks(worker, 3)
    (failure,) = world.facts(RequestFailed)
    assert (failure.error, failure.retryable) == ("OtherVersion", True)
    assert "version 1" in failure.message and "target is 0" in failure.message
    assert not worker.machine.requests.by_key


@pytest.mark.parametrize("phase", [Phase.PROMPTING, Phase.WAITING, Phase.RUNNING])
def test_cancelled_request_is_dropped_without_a_trace(phase: Phase) -> None:
    world = World(lengths=lambda seed, turn: 40)
    tasks = InlineTasks(held={PromptCall} if phase is Phase.PROMPTING else set())
    worker = world.start(slots=1, tasks=tasks)
    places = [world.place(worker, ordinal) for ordinal in range(3)]
    expected = places[2] if phase is Phase.WAITING else places[0]
    world.decide(*places)
    world.ticks(worker, 6)
    assert worker.machine.requests.by_key[f"{expected.trajectory}/1"].phase is phase
    world.decide(world.cancel(expected))
    world.ticks(worker, 4)
    tasks.held.clear()
    world.until_idle(worker)
    logged = [fact.trajectory for fact in world.facts(TrajectoryLogged)]
    assert logged == [request.trajectory for request in places if request is not expected]
    assert world.facts(RequestFailed) == []


def test_cancelled_request_that_has_its_reward_is_logged() -> None:
    world = World(lengths=lambda seed, turn: 5)
    worker = world.start()
    request = world.place(worker, 0)
    world.decide(request)
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.LOGGING) == 1)
    world.decide(world.cancel(request))
    world.until_idle(worker)
    assert [fact.trajectory for fact in world.facts(TrajectoryLogged)] == [request.trajectory]


def test_cancelled_request_waits_for_no_reward_that_may_never_come() -> None:
    world = World(lengths=lambda seed, turn: 5)
    worker = world.start(tasks=InlineTasks(held={RewardCall}))
    request = world.place(worker, 0)
    world.decide(request)
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.REWARDING) == 1)
    world.decide(world.cancel(request))
    world.until_idle(worker)
    assert world.facts(TrajectoryLogged) == []
    assert worker.tasks.forgotten == [f"{request.trajectory}/1"]


def test_placement_with_another_data_set_is_refused_for_good() -> None:
    world = World()
    worker = world.start(digests={"train": "f" * 64, "eval": "f" * 64})
    world.decide(world.place(worker, 0))
    world.ticks(worker, 3)
    (failure,) = world.facts(RequestFailed)
    assert (failure.error, failure.retryable) == ("OtherDataset", False)
    assert "dddddddddddd" in failure.message and "ffffffffffff" in failure.message


def test_placement_under_an_earlier_incarnation_is_refused_and_one_of_another_worker_ignored() -> (
    None
):
    world = World()
    first = world.start()
    other = world.start(worker="w1")
    second = world.start()
    world.decide(world.place(first, 0), world.place(other, 1))
    world.ticks(second, 3)
    (failure,) = world.facts(RequestFailed)
    assert (failure.trajectory, failure.error) == ("g0000000000-000", "EarlierIncarnation")
    assert failure.incarnation == second.setup.incarnation


def test_rounds_of_an_older_orchestrator_are_not_obeyed() -> None:
    world = World()
    worker = world.join()
    world.decide(world.assign(worker, 3), incarnation=2)
    world.decide(world.assign(worker, 1), incarnation=1)
    world.ticks(worker, 5)
    assert worker.machine.served.version == 3
    assert worker.counts["rounds of an older orchestrator"] == 1


def test_more_requests_than_a_worker_can_hold_are_refused() -> None:
    world = World()
    worker = world.start(slots=1, prefetch=1, tasks=InlineTasks(held={PromptCall}))
    most = worker.setup.requests_max
    world.decide(*(world.place(worker, ordinal) for ordinal in range(most + 1)))
    world.ticks(worker, 3)
    assert [fact.error for fact in world.facts(RequestFailed)] == ["TooMany"]
    assert len(worker.machine.requests.by_key) == most == 16


def test_fence_of_its_own_incarnation_ends_the_worker_and_nothing_more_is_published() -> None:
    world = World(lengths=lambda seed, turn: 8)
    worker = world.start()
    world.decide(world.place(worker, 0), world.place(worker, 1))
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.LOGGING) > 0)
    before = len(world.control())
    world.decide(Fence(reason="lease", worker="w0", incarnation=worker.setup.incarnation))
    world.ticks(worker, 1)
    written = len(world.records(TOPICS.trajectories)), len(world.records(TOPICS.metrics))
    assert worker.machine.outcome == "fenced"
    assert worker.machine.requests.by_key == {}
    assert len(world.control()) == before
    world.ticks(worker, 50)
    assert written == (len(world.records(TOPICS.trajectories)), len(world.records(TOPICS.metrics)))


def test_fence_of_an_earlier_incarnation_concerns_nobody() -> None:
    world = World()
    first = world.start()
    second = world.start()
    world.decide(Fence(reason="lease", worker="w0", incarnation=first.setup.incarnation))
    world.ticks(second, 5)
    assert not second.machine.finished


def test_decision_for_a_later_incarnation_of_its_name_means_that_it_was_replaced() -> None:
    world = World()
    first = world.start()
    second = world.join()
    world.decide(world.assign(second, 0))
    world.ticks(first, 5)
    assert first.machine.outcome == "replaced"
