"""Requests of several turns on a worker: slots, prefills, limits, lost environments."""

from __future__ import annotations

from itertools import chain, repeat

from dora_pipe.producers.tasks.calls import EnvObserved, EnvStep, RewardCall
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import RequestFailed, TrajectoryLogged
from tests.support.inline_tasks import InlineTasks, episode_tasks, failed
from tests.support.worker import World


def test_waiting_environment_holds_no_slot_and_its_next_turn_prefills_everything() -> None:
    world = World(lengths=lambda seed, turn: 6)
    tasks = episode_tasks(last=3)
    worker = world.start(slots=1, tasks=tasks)
    tasks.held.add(EnvStep)
    world.decide(world.place(worker, 0), world.place(worker, 1))
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.ENVIRONMENT) == 2)
    assert worker.engine.active == 0
    assert [wait.words for wait in worker.machine.waits(0)] == ["environments (2)"]
    tasks.held.clear()
    world.until_idle(worker)
    trajectory = world.trajectories()["g0000000000-000"]
    kinds = [segment.kind for segment in trajectory.segments]
    assert kinds == ["prompt", "model", "tool", "model", "tool", "model", "tool"]
    assert trajectory.meta.prefills == (3, 3 + 6 + 2, 3 + 2 * (6 + 2))
    assert trajectory.meta.finish == "environment"
    assert trajectory.sampled == 18
    assert [segment.turn for segment in trajectory.segments] == [0, 0, 0, 1, 1, 2, 2]


def test_reward_sees_every_turn_and_the_last_answer() -> None:
    world = World(lengths=lambda seed, turn: 4)
    tasks = episode_tasks(last=2)
    worker = world.start(tasks=tasks)
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (call,) = [call for call in tasks.seen if isinstance(call, RewardCall)]
    assert len(call.completion.turns) == 4
    assert call.completion.turns[1] == call.completion.turns[3] == "8 9"
    assert call.completion.text == call.completion.turns[2]


def test_turns_max_ends_by_length() -> None:
    world = World(lengths=lambda seed, turn: 3)
    worker = world.start(tasks=episode_tasks(last=99), max_turns={"train": 2, "eval": 2})
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (trajectory,) = world.trajectories().values()
    assert trajectory.meta.finish == "length"
    assert [segment.kind for segment in trajectory.segments].count("model") == 2


def test_observation_that_does_not_fit_the_context_is_left_out_and_ends_by_length() -> None:
    world = World(lengths=lambda seed, turn: 6)
    tasks = InlineTasks(episodes=True)
    tasks.step = lambda call: EnvObserved(
        request=call.request, text="9 " * 30, done=False, tool="", ok=True
    )
    worker = world.start(tasks=tasks, context_tokens=32)
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (trajectory,) = world.trajectories().values()
    assert (len(trajectory.token_ids), trajectory.meta.finish) == (9, "length")


def test_first_error_of_a_tool_is_named_beside_a_valid_reward() -> None:
    world = World(lengths=lambda seed, turn: 3)
    tasks = InlineTasks(episodes=True)
    errors = chain(("", "KeyError: t.py:3: 'x'"), repeat("ValueError: t.py:4: late"))
    tasks.step = lambda call: EnvObserved(
        request=call.request, text="9", done=False, tool="t", ok=False, error=next(errors)
    )
    worker = world.start(tasks=tasks, max_turns={"train": 4, "eval": 4})
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (fact,) = world.facts(TrajectoryLogged)
    assert (fact.tool_error, fact.error, fact.valid) == ("KeyError: t.py:3: 'x'", "", True)


def test_lost_episode_is_handed_back() -> None:
    world = World(lengths=lambda seed, turn: 6)
    tasks = episode_tasks(last=2)
    tasks.held.add(EnvStep)
    worker = world.start(tasks=tasks)
    world.decide(world.place(worker, 0))
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.ENVIRONMENT) == 1)
    (key,) = worker.machine.requests.by_key
    tasks.lose(key)
    world.until_idle(worker)
    (fact,) = world.facts(RequestFailed)
    assert (fact.error, fact.retryable) == ("EpisodeLost", True)
    assert tasks.forgotten == [key]


def test_environment_that_raises_makes_an_invalid_trajectory() -> None:
    world = World(lengths=lambda seed, turn: 6)
    tasks = InlineTasks(episodes=True, step=lambda call: failed(call, "KeyError", "'x'"))
    worker = world.start(tasks=tasks)
    world.decide(world.place(worker, 0))
    world.until_idle(worker)
    (logged,) = world.facts(TrajectoryLogged)
    trajectory = world.trajectory(logged)
    assert (logged.valid, logged.reward, logged.finish) == (False, None, "error")
    assert trajectory.meta.error == "KeyError: 'x'"
    assert not any(isinstance(call, RewardCall) for call in tasks.seen)
    assert len(tasks.forgotten) == 1
