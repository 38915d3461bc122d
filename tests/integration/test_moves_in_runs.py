"""Whole runs in which requests move, as the planner decides it: everything promised still holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.producers.worker.request import Phase
from dora_pipe.schemas.control import Command, RequestReleased
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support.cluster import Cluster, SimulatedParts, make_config

STEPS = 6
DRAINED = "w1"


def _lengths(seed: int, turn: int) -> int:
    return 20 + (seed % 9) ** 2 + (300 if seed % 7 == 0 else 0)


class Moved:
    def __init__(self, folder: Path, **changes: object) -> None:
        config = make_config(
            run__steps=STEPS,
            run__name="moved",
            rollout__prompts_per_step=6,
            sampling__max_tokens=700,
            workers__max_model_len=768,
            **changes,
        )
        parts = SimulatedParts(lengths=_lengths)
        names = ("w0", DRAINED, "w2", "w3")
        self.cluster = Cluster(folder, config, parts=parts, workers=names)
        self.machines: dict[int, WorkerMachine] = {}
        self._until(lambda: self.cluster.version >= 1)
        self._until(lambda: self._running(DRAINED) >= 3)
        self.cluster.tell(Command(at_ns=0, user="u", verb="drain", args={"worker": DRAINED}))
        self._until(lambda: self.cluster.version >= STEPS - 1)
        self.cluster.run()

    @property
    def counts(self) -> Counter[str]:
        counter: Counter[str] = Counter()
        for machine in self.machines.values():
            counter.update(machine.requests.counts)
        return counter

    def released(self) -> list[RequestReleased]:
        return self.cluster.facts(RequestReleased)

    def trajectories(self) -> list[Trajectory]:
        records = self.cluster.records(self.cluster.topics.trajectories)
        return [decode_trajectory(record.value) for record in records]

    def _running(self, name: str) -> int:
        machine: WorkerMachine = self.cluster.roles[name].machine
        return machine.requests.in_phase(Phase.RUNNING)

    def _until(self, done: Callable[[], bool]) -> None:
        def seen() -> bool:
            for name, role in self.cluster.roles.items():
                if name.startswith("w"):
                    self.machines[id(role.machine)] = role.machine
            return done()

        self.cluster.until(seen)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moved]:
    run = Moved(tmp_path_factory.mktemp("moved") / "run")
    yield run
    run.cluster.close()


def test_requests_moved_with_their_caches_and_none_is_left_over(moved: Moved) -> None:
    assert {release.worker for release in moved.released()} >= {DRAINED}
    with_cache = [release for release in moved.released() if release.kv is not None]
    assert len(with_cache) >= 3
    assert moved.counts["KV caches imported"] == len(with_cache)
    assert not [name for name in moved.counts if name.startswith("KV cache not")]
    assert moved.counts["refused"] == 0
    assert moved.cluster.handover.kept == {}


def test_run_with_moves_holds(moved: Moved) -> None:
    assert moved.cluster.clean_report().steps == STEPS


def test_records_count_the_moves_and_name_the_last_worker(moved: Moved) -> None:
    trajectories = [trajectory for trajectory in moved.trajectories() if trajectory.meta.migrations]
    assert trajectories
    for trajectory in trajectories:
        model = [segment for segment in trajectory.segments if segment.kind == "model"]
        assert len({(segment.worker, segment.incarnation) for segment in model}) > 1
        assert {segment.version for segment in model} == {trajectory.version}
        assert (trajectory.meta.worker, trajectory.meta.incarnation) == (
            model[-1].worker,
            model[-1].incarnation,
        )
        assert trajectory.meta.prefills[0] == trajectory.meta.prompt_tokens
        assert trajectory.meta.attempt > 1
    assert {trajectory.meta.worker for trajectory in trajectories}.isdisjoint({DRAINED})


def test_moved_trajectories_are_generated_again_bit_for_bit(moved: Moved) -> None:
    names = [
        trajectory.trajectory for trajectory in moved.trajectories() if trajectory.meta.migrations
    ]
    engine = SimulatedEngine(slots=5, context_tokens=768, lengths=_lengths)
    results = moved.cluster.regenerated(names, engine)
    assert [result for result in results if not result.equal] == []
    assert (
        min(result.prefills for result in results) == 1
    )  # moved with its KV cache: not prefilled again
