"""Episodes that survive: through deaths of workers and task processes, moves and drains.

A recording engine says what it sampled; the record must say the same, and be the one of a run that
nothing has disturbed.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.producers.tasks.calls import EnvStep
from dora_pipe.producers.worker.request import Phase, WorkerSetup
from dora_pipe.schemas.control import (
    RequestFailed,
    RequestReleased,
    Resume,
    TrajectoryLogged,
    WorkerLeft,
)
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.agents import RecordingEngine, recording_engine
from tests.support.games import Games
from tests.support.worker import Worker, World

NAME = "g0000000000-000"
ANY = -1
"""Turns: as many as there are."""


class Stage:
    def __init__(
        self, seed: int = 10, *, turns: int = 5, most: int = 12, slips: bool = False
    ) -> None:
        self.seed, self.turns, self.slips = seed, turns, slips
        self.engines: list[RecordingEngine] = []
        self.workers: list[Worker] = []
        self.attempt = 0
        self.resume: Resume | None = None
        self.kv: Blob | None = None
        self.world = World(lengths=lambda seed, turn: 1 + (seed >> 7) % most, engine=self._engine)

    def _engine(self, setup: WorkerSetup) -> RecordingEngine:
        self.engines.append(recording_engine(self.world, setup))
        return self.engines[-1]

    def tasks(self) -> Games:
        slip = len(self.workers) if self.slips else 0
        return Games(seed=self.seed, turns=self.turns, slip=slip)

    def worker(self) -> Worker:
        worker = self.world.start(
            worker=f"w{len(self.workers)}",
            tasks=self.tasks(),
            max_tokens=150,
            checkpoint_tokens=4,
            max_turns={"train": 9},
        )
        self.workers.append(worker)
        self.attempt += 1
        request = self.world.place(worker, 0, attempt=self.attempt, resume=self.resume, kv=self.kv)
        self.kv = None
        self.world.decide(request)
        return worker

    @property
    def key(self) -> str:
        return f"{NAME}/{self.attempt}"

    def until(self, worker: Worker, phase: Phase, turns: int) -> None:
        self.world.until(worker, lambda: self._at(worker, phase, turns))

    def _at(self, worker: Worker, phase: Phase, turns: int) -> bool:
        request = worker.machine.requests.by_key.get(self.key)
        return (
            request is not None
            and request.phase is phase
            and turns in (ANY, request.sequence.turns_taken)
            and (phase is not Phase.RUNNING or request.sequence.in_stay)
        )

    def kill(self, worker: Worker) -> None:
        self.resume = worker.machine.requests.progress().get(NAME, self.resume)

    def move(self, worker: Worker) -> None:
        released_before = len(self.world.facts(RequestReleased))
        request = self.world.place(worker, 0, attempt=self.attempt)
        self.world.decide(self.world.move(request, worker))
        self.world.ticks(worker, 12)
        released = self.world.facts(RequestReleased)[released_before:]
        for release in released:
            self.resume, self.kv = release.resume or self.resume, release.kv
        self.kill(worker)

    def stop(self, worker: Worker) -> None:
        self.world.stop(worker)
        remaining = self.world.facts(WorkerLeft)[-1]
        self.resume = remaining.progress.get(NAME, self.resume)

    def lose(self, worker: Worker) -> None:
        self.kill(worker)
        assert isinstance(worker.tasks, Games)
        if self.key in worker.tasks.told:
            worker.tasks.lose(self.key)
            self.world.ticks(worker, 3)

    def finish(self, worker: Worker) -> Trajectory:
        self.world.until_idle(worker)
        return self.world.trajectories()[NAME]


def alone(stage: Stage) -> Trajectory:
    calm = Stage(stage.seed, turns=stage.turns)
    calm.world.lengths = stage.world.lengths
    return calm.finish(calm.worker())


def check(stage: Stage, trajectory: Trajectory) -> None:
    calm = alone(stage)
    assert list(trajectory.token_ids) == list(calm.token_ids)
    assert list(trajectory.loss_mask) == list(calm.loss_mask)
    assert list(trajectory.logprobs) == list(calm.logprobs)
    assert list(trajectory.sampler_logprobs) == list(calm.sampler_logprobs)
    assert (trajectory.reward, trajectory.meta.finish) == (calm.reward, calm.meta.finish)
    assert turns_of(trajectory) == turns_of(calm)
    check_events(stage, trajectory)


def turns_of(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    results: list[tuple[Any, ...]] = []
    for segment in trajectory.segments:
        fields = (segment.kind, segment.turn, segment.end, segment.tool, segment.ok)
        if results and results[-1][:2] == fields[:2] and segment.kind == "model":
            results.pop()
        results.append(fields)
    return results


def check_events(stage: Stage, trajectory: Trajectory) -> None:
    ids, result = list(trajectory.token_ids), set[int]()
    for engine in stage.engines:
        for before, sampled in engine.stays:
            start = len(before)
            if before == ids[:start]:
                pairs = zip(ids[start:], sampled, strict=False)
                same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
                result.update(range(start, start + len(list(same))))
    assert {index for index, bit in enumerate(trajectory.loss_mask) if bit} <= result


# What ends a worker, at each place of an episode

PLACES = [
    (Phase.RUNNING, 0),
    (Phase.ENVIRONMENT, 0),
    (Phase.RUNNING, 1),
    (Phase.ENVIRONMENT, 2),
    (Phase.RUNNING, 3),
]


@pytest.mark.parametrize(("phase", "turns"), [*PLACES, (Phase.REWARDING, ANY)])
def test_episode_whose_process_dies_is_handed_back_and_told_again(phase: Phase, turns: int) -> None:
    stage = Stage(most=40)
    worker = stage.worker()
    stage.until(worker, phase, turns)
    stage.lose(worker)
    (fact,) = stage.world.facts(RequestFailed)
    assert (fact.error, fact.retryable) == ("EpisodeLost", True)
    check(stage, stage.finish(stage.worker()))


def test_environment_that_is_not_what_it_says_is_named_and_its_episode_not_gone_on_with() -> None:
    stage = Stage(most=40, slips=True)
    worker = stage.worker()
    stage.until(worker, Phase.RUNNING, 2)
    stage.kill(worker)
    other = stage.worker()
    stage.world.until(other, lambda: bool(stage.world.facts(RequestFailed)))
    (fact,) = stage.world.facts(RequestFailed)
    assert (fact.error, fact.retryable) == ("ReplayDiffers", True)
    assert fact.message.startswith("the answer to turn ")
    assert not other.machine.requests.by_key


BLOWS = st.tuples(st.sampled_from(["kill", "move", "stop", "lose", "hold"]), st.integers(1, 25))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(BLOWS, min_size=2, max_size=7))
def test_whatever_happens_at_any_moment_the_record_is_that_of_an_undisturbed_run(
    seed: int, blows: list[tuple[str, int]]
) -> None:
    stage = Stage(seed, turns=8, most=12)
    worker = stage.worker()
    for what, ticks in blows:
        stage.world.ticks(worker, ticks)
        if what == "hold":
            worker.tasks.held ^= {EnvStep}
        else:
            getattr(stage, what)(worker)
        if stage.world.facts(TrajectoryLogged):
            break
        if what != "hold":
            worker = stage.worker()
    worker.tasks.held.clear()
    check(stage, stage.finish(worker))
    assert all(worker.counts["progress unusable"] == 0 for worker in stage.workers)
    failed = {fact.error for fact in stage.world.facts(RequestFailed)}
    assert failed <= {"EpisodeLost"}
