"""Tests of a worker's status: its size does not grow with the number of requests."""

from __future__ import annotations

import pytest

from dora_pipe.core.pure.wait_tracker import Limits
from dora_pipe.producers.tasks.calls import EnvStep, PromptCall, RewardCall
from dora_pipe.producers.worker.request import Phase
from dora_pipe.producers.worker.status import AVERAGED_NS
from tests.support.inline_tasks import InlineTasks, episode_tasks
from tests.support.worker import HEARTBEAT_NS, TICK_NS, World

LONG_TICKS = 4 * AVERAGED_NS // TICK_NS
"""After which an average is what has been since."""


def test_status_comes_every_heartbeat_and_says_what_it_waits_for() -> None:
    world = World(lengths=lambda seed, turn: 150)
    worker = world.join(max_tokens=1000)
    world.ticks(worker, 3 * HEARTBEAT_NS // TICK_NS + 1)
    assert [status.waits_for for status in world.statuses()] == ["a version to host"] * 4
    world.decide(world.assign(worker, 0))
    world.ticks(worker, HEARTBEAT_NS // TICK_NS)
    assert world.statuses()[-1].waits_for == "requests of version 0"
    world.decide(*(world.place(worker, ordinal) for ordinal in range(6)))
    world.until(worker, lambda: world.statuses()[-1].active == 4)
    status = world.statuses()[-1]
    assert (status.waits_for, status.version, status.waiting) == ("", 0, 2)
    assert status.kv_used_tokens > 0
    world.until_idle(worker)
    world.ticks(worker, HEARTBEAT_NS // TICK_NS)
    assert world.statuses()[-1].tokens_total == 6 * 150


def _sizes(worker: object) -> dict[str, int]:
    requests = worker.machine.requests  # type: ignore[attr-defined]
    return {
        name: len(value)
        for name, value in vars(requests).items()
        if hasattr(value, "__len__") and name != "counts"
    }


@pytest.mark.parametrize("episodes", [False, True])
def test_nothing_grows_with_the_number_of_requests(episodes: bool) -> None:
    world = World(lengths=lambda seed, turn: 4 + seed % 20, steps_max=64)
    worker = world.start(
        tasks=episode_tasks(last=2) if episodes else InlineTasks(), checkpoint_tokens=4
    )

    def serve(first: int, count: int) -> None:
        for ordinal in range(first, first + count, 6):
            places = [world.place(worker, ordinal + index) for index in range(6)]
            world.decide(*places)
            world.ticks(worker, 2)
            world.decide(world.cancel(places[0]))
            world.until_idle(worker)

    serve(0, 30)
    before = _sizes(worker)
    serve(100, 300)
    assert _sizes(worker) == before
    assert before.pop("_phases") <= len(Phase)
    assert before.pop("versions") == 1
    assert set(before.values()) == {0}
    assert worker.counts["refused"] == 0


def test_idle_worker_is_heard_once_a_quiet_period_and_at_once_when_something_changes() -> None:
    world = World()
    worker = world.join(quiet_ns=4 * HEARTBEAT_NS)
    world.ticks(worker, 12 * HEARTBEAT_NS // TICK_NS + 1)
    times = [status.at_ns - 10**18 for status in world.statuses()]
    assert times == [0, 4 * HEARTBEAT_NS, 8 * HEARTBEAT_NS, 12 * HEARTBEAT_NS]
    world.decide(world.assign(worker, 0))
    world.ticks(worker, HEARTBEAT_NS // TICK_NS)
    last = world.statuses()[-1]
    assert (last.at_ns - 10**18, last.version) == (13 * HEARTBEAT_NS, 0)


def test_alarm_is_said_at_the_heartbeat_at_which_a_wait_becomes_one() -> None:
    limits = Limits(short_s=0.6, work_s=1.2)
    world = World()
    worker = world.join(quiet_ns=4 * HEARTBEAT_NS, limits=limits)
    world.ticks(worker, 4 * HEARTBEAT_NS // TICK_NS)
    results = [(status.at_ns - 10**18, status.waits[0].overdue) for status in world.statuses()]
    assert results == [(0, False), (3 * HEARTBEAT_NS, True)]


def test_status_says_how_many_requests_need_no_slot_on_average() -> None:
    world = World(lengths=lambda seed, turn: 5)
    tasks = InlineTasks(held={RewardCall})
    worker = world.start(tasks=tasks, quiet_ns=4 * HEARTBEAT_NS)
    world.decide(*(world.place(worker, ordinal) for ordinal in range(3)))
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.REWARDING) == 3)
    assert world.statuses()[-1].off_engine == 0, "they may be back at once"
    world.ticks(worker, LONG_TICKS)
    status = world.statuses()[-1]
    assert (status.off_engine, status.being_scored, status.active) == (3, 3, 0)
    tasks.held.clear()
    world.until_idle(worker)
    world.ticks(worker, HEARTBEAT_NS // TICK_NS)
    assert world.statuses()[-1].off_engine == 0


def test_what_takes_a_moment_is_no_news() -> None:
    world = World(lengths=lambda seed, turn: 5)
    worker = world.start()
    world.decide(*(world.place(worker, ordinal) for ordinal in range(6)))
    world.until_idle(worker)
    world.ticks(worker, 2 * HEARTBEAT_NS // TICK_NS)
    assert {status.off_engine for status in world.statuses()} == {0}


def test_prompts_do_not_count_while_the_task_processes_are_starting() -> None:
    world = World(lengths=lambda seed, turn: 5)
    tasks = InlineTasks(held={PromptCall})
    worker = world.start(tasks=tasks)
    world.decide(*(world.place(worker, ordinal) for ordinal in range(4)))
    world.ticks(worker, 2 * HEARTBEAT_NS // TICK_NS)
    assert world.statuses()[-1].off_engine == 0
    tasks.held.clear()
    world.until_idle(worker)
    tasks.held.add(PromptCall)
    world.decide(*(world.place(worker, 10 + ordinal) for ordinal in range(4)))
    world.ticks(worker, LONG_TICKS)
    assert world.statuses()[-1].off_engine == 4


def test_request_whose_tool_has_answered_goes_before_those_that_have_not_begun() -> None:
    world = World(lengths=lambda seed, turn: 60, steps_max=1)
    tasks = episode_tasks(last=2)
    tasks.held.add(EnvStep)
    worker = world.start(tasks=tasks, slots=1, prefetch=0, max_tokens=200)
    world.decide(*(world.place(worker, ordinal) for ordinal in range(5)))
    requests = worker.machine.requests
    world.until(worker, lambda: requests.in_phase(Phase.ENVIRONMENT) == 1)
    (first,) = [state for state in requests.by_key.values() if state.phase is Phase.ENVIRONMENT]
    tasks.held.clear()
    world.until(worker, lambda: first.sequence.turns_taken == 1 and first.phase is Phase.RUNNING)
    begun = [state for state in requests.by_key.values() if state.sequence.sampled_tokens]
    assert len(begun) == 2, "itself, and the one that had its slot meanwhile"


def test_worker_takes_more_requests_than_an_orchestrator_places() -> None:
    from dora_pipe.orchestrator.entities import OPEN_TIMES

    setup = World().start().setup
    assert setup.requests_max > OPEN_TIMES * (setup.slots + setup.prefetch)
