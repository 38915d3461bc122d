"""Tests of a worker that loads and drops several versions."""

from __future__ import annotations

from typing import Any

from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import RequestFailed, TrajectoryLogged
from tests.support.worker import Worker, World

ALL = {"max_resident_versions": 3}


def long(seed: int, turn: int) -> int:
    return 60


def logged(world: World) -> dict[str, TrajectoryLogged]:
    return {fact.trajectory: fact for fact in world.facts(TrajectoryLogged)}


def serving(world: World, *versions: int, **changes: Any) -> Worker:
    worker = world.start(versions[0], **(ALL | changes))
    for version in versions[1:]:
        loaded(world, worker, version)
    return worker


def loaded(world: World, worker: Worker, version: int) -> None:
    world.decide(world.assign(worker, version))
    world.until(worker, lambda: worker.machine.served.version == version)


def test_dropped_version_makes_room_and_its_requests_are_refused() -> None:
    world = World()
    worker = serving(world, 0, 1, 2)
    world.decide(world.assign(worker, 3, 0, 1))
    world.until(worker, lambda: worker.machine.served.version == 3)
    assert worker.machine.loaded.versions == [2, 3]
    world.decide(world.place(worker, 0, version=1), world.place(worker, 1, version=2))
    world.until_idle(worker)
    (failed,) = world.facts(RequestFailed)
    assert (failed.error, failed.retryable) == ("OtherVersion", True)
    assert len(logged(world)) == 1


def test_request_of_a_version_that_is_dropped_all_the_same_is_handed_back() -> None:
    world = World(lengths=long)
    worker = serving(world, 0, 1)
    world.decide(world.place(worker, 0, version=0), world.place(worker, 1, version=1))
    world.until(worker, lambda: worker.machine.requests.in_phase(Phase.RUNNING) == 2)
    world.decide(world.assign(worker, 2, 0))
    world.until_idle(worker)
    (failed,) = world.facts(RequestFailed)
    assert (failed.trajectory, failed.error) == ("g0000000000-000", "Retargeted")
    assert list(logged(world)) == ["g0000000001-000"]
