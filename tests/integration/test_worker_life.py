"""The life of a request on a worker, its prompt and its reward, from placement to the log."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from dora_pipe.producers.tasks.calls import PromptReady, RewardCall, Rewarded
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import RequestFailed, TrajectoryLogged
from dora_pipe.schemas.headers import parse_headers
from dora_pipe.schemas.identity import trajectory_seed
from dora_pipe.schemas.wire import sha256_hex
from tests.support.inline_tasks import InlineTasks, failed
from tests.support.worker import TOPICS, World, digest_of


def test_request_lives_from_placement_to_a_fact_that_points_at_its_record() -> None:
    world = World()
    worker = world.start()
    request = world.place(worker, 3, 5)
    world.decide(request)
    world.until_idle(worker)
    (logged,) = world.facts(TrajectoryLogged)
    trajectory = world.trajectory(logged)
    assert (logged.trajectory, logged.attempt, logged.finish) == ("g0000000003-005", 1, "stop")
    assert (logged.reward, logged.valid, logged.partition) == (1.0, True, request.spec.partition)
    assert (logged.version, logged.digest) == (0, digest_of(0))
    assert logged.tokens == trajectory.sampled > 0
    assert list(trajectory.token_ids[:3]) == [5, 6, 7]
    assert trajectory.meta.seed == trajectory_seed(request.spec.seed, 5)
    assert trajectory.meta.prefills == (3,)
    assert [segment.kind for segment in trajectory.segments] == ["prompt", "model"]
    assert trajectory.segments[1].incarnation == worker.setup.incarnation
    assert (trajectory.meta.reward_raw, trajectory.meta.reward_parts) == (0.5, {"exact": 1.0})
    times = trajectory.meta.times
    assert times.started and times.first_token and times.finished and times.rewarded
    order = [times.scheduled, times.started, times.first_token, times.finished, times.rewarded]
    assert order == sorted(order)


def test_headers_say_what_the_record_says_and_the_digest_covers_its_bytes() -> None:
    world = World()
    worker = world.start()
    world.decide(world.place(worker, 3))
    world.until_idle(worker)
    (record,) = world.records(TOPICS.trajectories)
    (logged,) = world.facts(TrajectoryLogged)
    headers = parse_headers(record.headers)
    assert logged.sha256 == headers.sha256 == sha256_hex(record.value)
    assert logged.bytes == len(record.value)
    assert (headers.run, headers.deadline, headers.incarnation) == (
        "r",
        2,
        worker.setup.incarnation,
    )
    assert record.key == b"g0000000003"


def test_two_workers_give_the_same_trajectories_whatever_else_runs() -> None:
    alone = World()
    worker = alone.start()
    alone.decide(alone.place(worker, 7, 2))
    alone.until_idle(worker)
    crowd = World()
    other = crowd.start(slots=2)
    crowd.decide(*(crowd.place(other, o, s) for o in (5, 6, 7) for s in range(4)))
    crowd.until_idle(other)
    mine = alone.trajectories()["g0000000007-002"]
    assert crowd.trajectories()["g0000000007-002"].token_ids == mine.token_ids


@pytest.mark.parametrize("error", ["ValueError", "TimedOut", "ProcessDied", "NoAnswer"])
def test_reward_that_raises_or_hangs_makes_an_invalid_trajectory_never_a_zero(error: str) -> None:
    world = World()
    tasks = InlineTasks(reward=lambda call: failed(call, error, "it did not work"))
    worker = world.start(tasks=tasks)
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (logged,) = world.facts(TrajectoryLogged)
    meta = world.trajectory(logged).meta
    assert (logged.reward, logged.valid, logged.finish) == (None, False, "stop")
    assert meta.reward_error == f"{error}: it did not work"
    assert parse_headers(world.records(TOPICS.trajectories)[0].headers).reward is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_reward_that_is_no_number_makes_an_invalid_trajectory(value: float) -> None:
    world = World()
    tasks = InlineTasks(
        reward=lambda call: Rewarded(request=call.request, reward=value, raw=None, parts={})
    )
    worker = world.start(tasks=tasks)
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (logged,) = world.facts(TrajectoryLogged)
    assert (logged.reward, logged.valid) == (None, False)


def test_reward_under_way_does_not_hold_a_slot() -> None:
    world = World(lengths=lambda seed, turn: 5)
    tasks = InlineTasks(held={RewardCall})
    worker = world.start(slots=1, tasks=tasks)
    world.decide(world.place(worker, 0), world.place(worker, 1))
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.REWARDING) == 2)
    assert [wait.words for wait in worker.machine.waits(0)] == ["rewards (2)"]
    tasks.held.clear()
    world.until_idle(worker)
    assert len(world.facts(TrajectoryLogged)) == 2


def test_prompt_that_raises_fails_the_request_for_good() -> None:
    world = World()
    worker = world.start(tasks=InlineTasks(prompt=lambda call: failed(call, "KeyError", "'q'")))
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (failure,) = world.facts(RequestFailed)
    assert (failure.error, failure.message, failure.retryable) == ("KeyError", "row 0: 'q'", False)


def test_prompt_longer_than_the_context_fails_the_request_for_good() -> None:
    world = World()
    tasks = InlineTasks(
        prompt=lambda call: PromptReady(request=call.request, text="4 " * 32, episode=False)
    )
    worker = world.start(tasks=tasks, context_tokens=32)
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (failure,) = world.facts(RequestFailed)
    assert (failure.error, failure.retryable) == ("PromptUnfit", False)
    assert "32 tokens" in failure.message


def test_record_that_is_too_large_fails_the_request_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dora_pipe.producers.worker.requests.VALUE_BYTES_MAX", 10)
    world = World()
    worker = world.start()
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (failure,) = world.facts(RequestFailed)
    assert (failure.error, failure.retryable) == ("RecordTooLarge", False)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a library"), ValueError("odd")])
@pytest.mark.parametrize(
    "encoder", ["requests.encode_trajectory", "request_table.encode_any_progress"]
)
def test_record_that_cannot_be_encoded_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, encoder: str, error: Exception
) -> None:
    world = World(lengths=lambda seed, turn: 40)
    worker = world.start(checkpoint_tokens=16)
    with monkeypatch.context() as patched:
        encode = Mock(side_effect=error)
        patched.setattr(f"dora_pipe.producers.worker.{encoder}", encode)
        world.decide(world.place(worker, 1))
        world.until_idle(worker)
    (failure,) = world.facts(RequestFailed)
    assert (failure.error, failure.retryable) == ("SchemaError", False)
    world.decide(world.place(worker, 2))
    world.until_idle(worker)
    assert list(world.trajectories()) == ["g0000000002-000"]
