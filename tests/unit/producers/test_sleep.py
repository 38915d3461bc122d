"""Tests of a worker that sleeps: requests, weights, report."""

from __future__ import annotations

from dora_pipe.producers.worker.request import NOTHING
from dora_pipe.schemas.control import RequestReleased, TrajectoryLogged, WorkerReady
from dora_pipe.schemas.rounds import NO_VERSION, Assign, Migrate
from tests.support.worker import Worker, World


def asleep(worker: Worker) -> Assign:
    return Assign(
        reason="t",
        worker=worker.setup.worker,
        incarnation=worker.setup.incarnation,
        version=NO_VERSION,
        digest="",
    )


def ready(world: World) -> list[tuple[int, str]]:
    return [(fact.version, fact.digest) for fact in world.facts(WorkerReady)]


def test_what_runs_is_let_go_of_first_and_what_does_not_move_is_finished() -> None:
    world = World(lengths=lambda seed, turn: 40)
    worker = world.start(0)
    moved, stays = world.place(worker, 0), world.place(worker, 1)
    world.decide(moved, stays)
    world.until(worker, lambda: worker.machine.requests.tokens_total > 10)
    to_nobody = Migrate(
        reason="t",
        trajectory=moved.trajectory,
        attempt=moved.attempt,
        worker=moved.worker,
        incarnation=moved.incarnation,
        to="",
        to_incarnation=-1,
    )
    world.decide(asleep(worker), to_nobody)
    world.until(worker, lambda: worker.machine.served == NOTHING)
    world.until(worker, lambda: bool(world.facts(TrajectoryLogged)))
    (released,) = world.facts(RequestReleased)
    assert released.trajectory == moved.trajectory
    (logged,) = world.facts(TrajectoryLogged)
    assert logged.trajectory == stays.trajectory
    assert ready(world)[-1] == (NO_VERSION, "")


def test_a_sleeping_worker_refuses_what_it_is_given() -> None:
    world = World(lengths=lambda seed, turn: 5)
    worker = world.start(0)
    world.decide(asleep(worker))
    world.until(worker, lambda: worker.machine.served == NOTHING)
    world.decide(world.place(worker, 0))
    world.ticks(worker, 5)
    assert not worker.machine.requests.by_key
    assert not world.facts(TrajectoryLogged)
