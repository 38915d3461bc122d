"""A progress record is known to the orchestrator at once: a crash right after it costs nothing."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from dora_pipe.core.pure.machine import BUS_TURN_NS
from dora_pipe.core.pure.status_schedule import WHOLE_EVERY
from dora_pipe.producers.worker.machine import PROGRESS_STATUS_NS
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.metrics import WorkerStatus, decode_metrics
from dora_pipe.schemas.rounds import Schedule, decode_round
from tests.support.cluster import Cluster, SimulatedParts, make_config
from tests.support.worker import TICK_NS, TOPICS, World

TURN_TICKS = BUS_TURN_NS // TICK_NS


def test_acknowledged_progress_record_brings_the_next_status_forward() -> None:
    world = World(lengths=lambda seed, turn: 60)
    worker = world.start(checkpoint_tokens=16, heartbeat_ns=10**12)
    world.ticks(worker, 2 * TURN_TICKS)
    before = len(world.statuses())
    world.decide(world.place(worker, 1))
    world.until(worker, lambda: len(world.records(TOPICS.progress)) == 1)
    (record,) = world.records(TOPICS.progress)
    world.ticks(worker, 3)
    (status,) = world.statuses()[before:]
    expected = {"g0000000001-000": Resume(tokens=16, partition=1, offset=record.offset)}
    assert status.progress == expected


def test_many_progress_records_bring_at_most_one_status_per_bus_turn() -> None:
    world = World(lengths=lambda seed, turn: 200)
    worker = world.start(checkpoint_tokens=2, heartbeat_ns=10**12, max_tokens=1000)
    world.decide(*(world.place(worker, 1, sample) for sample in range(4)))
    world.until_idle(worker)
    world.ticks(worker, TURN_TICKS)
    assert len(world.records(TOPICS.progress)) > 100
    times = [status.at_ns for status in world.statuses()]
    assert all(after - before >= PROGRESS_STATUS_NS for before, after in pairwise(times))
    assert len(times) > 3


def test_statuses_of_many_running_requests_say_what_has_changed_alone() -> None:
    world = World(lengths=lambda seed, turn: 900)
    worker = world.start(
        slots=80, checkpoint_tokens=100, heartbeat_ns=20 * TICK_NS, max_tokens=1000
    )
    world.decide(*(world.place(worker, 1, sample) for sample in range(80)))
    world.until(worker, lambda: len(worker.machine.requests.progress()) == 80)
    world.ticks(worker, 3 * WHOLE_EVERY * 20)
    statuses = [decode_metrics(record.value) for record in world.records(TOPICS.metrics)]
    statuses_sent = [status for status in statuses if isinstance(status, WorkerStatus)]
    full_texts = [text for text in statuses_sent if not text.since]
    assert len(full_texts) == -(-len(statuses_sent) // WHOLE_EVERY) > 1
    named = sum(len(status.progress) for status in statuses_sent if status.since)
    chunks = len(world.records(TOPICS.progress))
    assert named <= chunks, "each record of progress is named once, but in whole statuses"
    assert world.statuses()[-1].progress == worker.machine.requests.progress()


def test_worker_without_progress_keeps_to_its_heartbeat() -> None:
    world = World(lengths=lambda seed, turn: 60)
    worker = world.start(checkpoint_tokens=1000, heartbeat_ns=20 * TICK_NS, max_tokens=1000)
    world.decide(world.place(worker, 1))
    world.until_idle(worker)
    times = [status.at_ns for status in world.statuses()]
    assert {after - before for before, after in pairwise(times)} == {20 * TICK_NS}


def test_crash_right_after_a_progress_record_goes_on_from_it(tmp_path: Path) -> None:
    config = make_config(
        timing__heartbeat_s=1.0,
        timing__lease_s=3.0,
        sampling__max_tokens=160,
        workers__checkpoint_tokens=40,
    )
    parts = SimulatedParts(lengths=lambda seed, turn: 150)
    with Cluster(tmp_path, config, on_disk=False, parts=parts) as cluster:
        progress = _fresh_progress(cluster, "w1")
        cluster.kill("w1")
        cluster.ticks(4 * 10**9 // TICK_NS)
        cluster.start("w1")
        cluster.run()
        placed = _placed_again(cluster)
    assert {name: placed[name] for name in progress} == progress


def _fresh_progress(cluster: Cluster, name: str) -> dict[str, Resume]:
    cluster.until(lambda: cluster.version >= 1)
    machine = cluster.roles[name].machine
    requests = machine.requests
    for _ in range(2000):
        before, calm_ns = requests.progress(), machine.wake_at() - cluster.clock.now_ns()
        cluster.tick()
        if calm_ns < 500_000_000:
            continue  # the next heartbeat would tell it anyway
        fresh = {
            index: entry
            for index, entry in requests.progress().items()
            if before.get(index) != entry
        }
        if fresh:
            cluster.ticks(2 * TURN_TICKS)
            still = requests.progress()
            fresh = {index: entry for index, entry in fresh.items() if still.get(index) == entry}
        if fresh:
            return fresh
    raise AssertionError("no request keeps a progress record for long enough")


def _placed_again(cluster: Cluster) -> dict[str, Resume | None]:
    rounds = [decode_round(record.value) for record in cluster.records(cluster.topics.decisions)]
    decisions = [decision for round_ in rounds for decision in round_.decisions]
    return {
        request.trajectory: request.resume
        for decision in decisions
        if isinstance(decision, Schedule)
        for request in decision.requests()
        if request.attempt == 2
    }
