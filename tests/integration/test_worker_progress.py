"""Progress records, going on from them, and the ways in which a worker ends."""

from __future__ import annotations

from typing import cast

import pytest

from dora_pipe.producers.tasks.calls import RewardCall
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import Resume, TrajectoryLogged, WorkerLeft, WorkerReady
from dora_pipe.schemas.rounds import Drain, StopRun
from dora_pipe.schemas.trajectory import Progress
from dora_pipe.schemas.trajectory_codec import decode_any_progress
from tests.support.inline_tasks import InlineTasks
from tests.support.worker import TICK_NS, TOPICS, World, spec_of


def test_progress_is_written_every_so_many_tokens_as_a_chain_and_reported() -> None:
    world = World(lengths=lambda seed, turn: 60)
    worker = world.start(checkpoint_tokens=16, heartbeat_ns=TICK_NS)
    world.decide(world.place(worker, 1))
    world.until(worker, lambda: len(world.records(TOPICS.progress)) == 3)
    world.ticks(worker, 2)
    records = world.records(TOPICS.progress)
    chunks = [cast("Progress", decode_any_progress(record.value)) for record in records]
    assert [chunk.start for chunk in chunks] == [0, 3 + 16, 3 + 32]
    assert [chunk.previous for chunk in chunks] == [-1, records[0].offset, records[1].offset]
    assert {record.partition for record in records} == {spec_of(1).partition}
    resume = Resume(tokens=48, partition=1, offset=records[2].offset)
    assert worker.machine.requests.progress() == {"g0000000001-000": resume}
    world.ticks(worker, 1)
    assert world.statuses()[-1].progress == {"g0000000001-000": resume}


def _killed_at(world: World, tokens: int, length: int) -> tuple[Resume, list[int]]:
    calm = world.start(worker="calm", max_tokens=1000)
    world.decide(world.place(calm, 0))
    world.until_idle(calm)
    token_ids = list(world.trajectories()["g0000000000-000"].token_ids)
    assert len(token_ids) == 3 + length
    victim = world.start(worker="victim", max_tokens=1000, checkpoint_tokens=32)
    world.decide(world.place(victim, 0))
    world.until(victim, lambda: victim.engine.kv_used_tokens == 3 + tokens)
    return victim.machine.requests.progress()["g0000000000-000"], token_ids


def test_request_killed_at_token_200_goes_on_from_its_progress_with_the_same_tokens() -> None:
    world = World(lengths=lambda seed, turn: 300)
    resume, expected = _killed_at(world, tokens=200, length=300)
    assert resume.tokens >= 200 - 32 - 2
    other = world.start(worker="other", max_tokens=1000)
    world.decide(world.place(other, 0, attempt=2, resume=resume))
    world.until_idle(other)
    trajectory = world.trajectory(world.facts(TrajectoryLogged)[-1])
    assert list(trajectory.token_ids) == expected
    assert trajectory.meta.prefills == (3, 3 + resume.tokens)
    model = [segment for segment in trajectory.segments if segment.kind == "model"]
    assert [segment.worker for segment in model] == ["victim", "other"]
    assert model[0].end == model[1].start == 3 + resume.tokens
    assert trajectory.meta.attempt == 2


def test_chain_that_is_broken_leaves_the_request_to_start_from_its_prompt() -> None:
    world = World(lengths=lambda seed, turn: 300)
    resume, expected = _killed_at(world, tokens=200, length=300)
    for wrong in (
        Resume(tokens=resume.tokens + 1, partition=resume.partition, offset=resume.offset),
        Resume(tokens=resume.tokens, partition=resume.partition, offset=resume.offset - 1),
        Resume(tokens=resume.tokens, partition=1 - resume.partition, offset=0),
    ):
        worker = world.start(max_tokens=1000)
        world.decide(world.place(worker, 0, attempt=2, resume=wrong))
        world.until_idle(worker)
        trajectory = world.trajectory(world.facts(TrajectoryLogged)[-1])
        assert trajectory.meta.prefills == (3,)
        assert list(trajectory.token_ids) == expected
        assert worker.counts["progress unusable"] == 1


def test_stop_asked_writes_a_last_progress_record_and_leaves() -> None:
    world = World(lengths=lambda seed, turn: 300)
    worker = world.start(slots=1, max_tokens=1000, checkpoint_tokens=128)
    world.decide(world.place(worker, 0), world.place(worker, 1))
    world.until(worker, lambda: worker.engine.kv_used_tokens == 3 + 90)
    world.stop(worker)
    (event,) = world.facts(WorkerLeft)
    assert worker.machine.outcome == "left"
    assert event.reason == "its process was asked to stop"
    resume = event.progress["g0000000000-000"]
    assert 64 <= resume.tokens <= 90
    assert list(event.progress) == ["g0000000000-000"]
    chunk = decode_any_progress(world.records(TOPICS.progress)[-1].value)
    assert isinstance(chunk, Progress)
    assert chunk.start + len(chunk.token_ids) == 3 + resume.tokens
    assert worker.engine.active == 0


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), MemoryError()])
def test_engine_that_raises_costs_its_worker_and_no_request(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(lengths=lambda seed, turn: 300)
    worker = world.start(slots=1, max_tokens=1000, checkpoint_tokens=16)
    world.decide(world.place(worker, 0), world.place(worker, 1))
    world.until(worker, lambda: worker.engine.kv_used_tokens == 3 + 90)

    def broken(*_: object) -> None:
        raise error

    for name in ("step", "add", "cancel", "export"):
        monkeypatch.setattr(worker.engine, name, broken)
    world.until(worker, lambda: worker.machine.finished)
    (event,) = world.facts(WorkerLeft)
    assert event.reason.startswith("the engine of worker w0 failed: ")
    assert type(error).__name__ in event.reason
    assert 64 <= event.progress["g0000000000-000"].tokens <= 90
    assert (worker.machine.outcome, worker.machine.error_is_local) == ("failed", True)


def test_worker_that_leaves_does_not_wait_for_ever_for_a_reward() -> None:
    world = World(lengths=lambda seed, turn: 5)
    worker = world.start(tasks=InlineTasks(held={RewardCall}), stop_timeout_ns=10**9)
    world.decide(world.place(worker, 0))
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.REWARDING) == 1)
    asked_ns = world.clock.ns

    def stop() -> bool:
        world.clock.ns += TICK_NS
        return True

    worker.runtime.run(stop)
    assert len(world.facts(WorkerLeft)) == 1
    assert 10**9 <= world.clock.ns - asked_ns < 2 * 10**9


def test_drained_worker_finishes_what_it_has_and_takes_nothing_more() -> None:
    world = World(lengths=lambda seed, turn: 30)
    worker = world.start(slots=1)
    world.decide(world.place(worker, 0), world.place(worker, 1))
    world.ticks(worker, 5)
    drain = Drain(reason="smaller", worker="w0", incarnation=worker.setup.incarnation)
    world.decide(drain, world.place(worker, 2), world.assign(worker, 1))
    world.until(worker, lambda: worker.machine.finished)
    assert len(world.facts(TrajectoryLogged)) == 2
    (fact,) = world.facts(WorkerLeft)
    assert fact.reason == "drained: smaller"
    assert [ready.version for ready in world.facts(WorkerReady)] == [0]


def test_end_of_the_run_ends_the_worker_at_once() -> None:
    world = World(lengths=lambda seed, turn: 300)
    worker = world.start(max_tokens=1000)
    world.decide(world.place(worker, 0))
    world.ticks(worker, 20)
    world.decide(StopRun(reason="done"))
    world.until(worker, lambda: worker.machine.finished)
    assert worker.machine.outcome == "left"
    assert [fact.reason for fact in world.facts(WorkerLeft)] == ["the run stopped: done"]
