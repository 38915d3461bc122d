"""What a worker says of itself, and that nothing in it grows with the number of requests."""

from __future__ import annotations

import pytest

from dora_pipe.bus.port import TopicPartition
from dora_pipe.producers.rows import Phase
from tests.support.inline_tasks import InlineTasks, episode_tasks
from tests.support.worker import HEARTBEAT_NS, TICK_NS, TOPICS, World


def test_status_comes_every_heartbeat_and_says_what_it_waits_for() -> None:
    world = World(lengths=lambda seed, turn: 150)
    worker = world.join(max_tokens=1000)
    world.ticks(worker, 3 * HEARTBEAT_NS // TICK_NS + 1)
    assert [status.waits_for for status in world.statuses()] == ["a first version to host"] * 4
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
    """Lengths of every collection that the machine holds."""
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
            places = [world.place(worker, ordinal + one) for one in range(6)]
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


def test_position_to_read_from_lies_before_anything_decided_about_this_incarnation() -> None:
    world = World()
    world.start()
    worker = world.join()
    at = TopicPartition(TOPICS.decisions, 0)
    assert worker.machine.positions() == {at: world.bus.end(at)}
