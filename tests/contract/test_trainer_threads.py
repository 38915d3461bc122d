"""Tests of the trainer with a SQLite log, a worker thread and its event loop."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.learner import Learner, Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.role import run_trainer
from dora_pipe.core.errors import Fenced, InvariantBroken, NonFinite, ReplayDiverged, UsageError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.schemas.control import RoleStarted
from dora_pipe.schemas.identity import group_id, trajectory_id
from tests.support.trainer_stage import RUN, TrainerStage

LIMIT_S = 30.0


class SlowTrainer(SimulatedLearner):
    def __init__(self, gate: threading.Event) -> None:
        super().__init__()
        self._gate = gate

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        assert self._gate.wait(LIMIT_S)
        return super().train(batch, settings)


class Running:
    def __init__(self, stage: TrainerStage, open_bus: Callable[[], Bus], **options: Any) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._make = options.pop("make", SimulatedLearner)
        self._options = options
        self._stage = stage
        self._open_bus = open_bus
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            run_trainer(
                self._open_bus,
                self._stage.topics,
                store=self._stage.store,
                stop=self.stop.is_set,
                learner_factory=self._trainer,
                **self._options,
            )
        except (Fenced, InvariantBroken, NonFinite, ReplayDiverged, UsageError) as error:
            self.error = error

    def _trainer(self, *, assets: Path, reference: Path, config: Config) -> Learner:
        learner: Learner = self._make()
        return learner

    def join(self) -> BaseException | None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        return self.error

    def end(self) -> None:
        self.stop.set()
        assert self.join() is None


def wait_for(done: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


@pytest.fixture
def open_bus(tmp_path: Path) -> Callable[[], Bus]:
    SqliteBus(tmp_path / "log.sqlite").close()
    return lambda: SqliteBus(tmp_path / "log.sqlite")


@pytest.fixture
def stage(tmp_path: Path, open_bus: Callable[[], Bus]) -> Iterator[TrainerStage]:
    stage = TrainerStage(tmp_path, open_bus)
    yield stage
    stage.bus.close()


def test_steps_are_committed_and_a_restart_goes_on(
    stage: TrainerStage, open_bus: Callable[[], Bus]
) -> None:
    stage.start_run(checkpoint_every=2)
    running = Running(stage, open_bus)
    for step in range(3):
        stage.commits()
        stage.take_new(step)
        wait_for(lambda done=step: len(stage.commits()) > done)  # type: ignore[misc]
    running.end()
    again = Running(stage, open_bus)
    stage.take_new(3)
    wait_for(lambda: len(stage.commits()) == 4)
    stage.stop_run()
    assert again.join() is None
    commits = stage.commits()
    assert [commit.incarnation for commit in commits] == [0, 0, 0, 1]
    assert [commit.digest_before for commit in commits[1:]] == [
        commit.digest_after for commit in commits[:-1]
    ]


def test_heartbeats_go_on_while_a_step_is_trained(
    stage: TrainerStage, open_bus: Callable[[], Bus]
) -> None:
    config = msgspec.convert(stage.start_run().config, Config)
    timing = msgspec.structs.replace(config.timing, heartbeat_s=0.02)
    config = msgspec.structs.replace(config, timing=timing)
    gate = threading.Event()
    running = Running(stage, open_bus, make=lambda: SlowTrainer(gate), config=config)
    stage.take_new(0)
    wait_for(lambda: sum(status.phase == "training" for status in stage.statuses()) >= 3)
    assert stage.commits() == []
    gate.set()
    wait_for(lambda: len(stage.commits()) == 1)
    running.end()
    assert stage.statuses()[-1].cost.codec_s > 0


def test_stop_during_a_step_commits_it_first(
    stage: TrainerStage, open_bus: Callable[[], Bus]
) -> None:
    stage.start_run()
    gate = threading.Event()
    running = Running(stage, open_bus, make=lambda: SlowTrainer(gate))
    stage.take_new(0)
    wait_for(lambda: any(status.phase == "training" for status in stage.statuses()))
    running.stop.set()
    gate.set()
    assert running.join() is None
    assert len(stage.commits()) == 1


def test_error_in_the_thread_ends_the_role_with_that_error(
    stage: TrainerStage, open_bus: Callable[[], Bus]
) -> None:
    stage.start_run()
    name = trajectory_id(group_id("train", 0), 0)
    running = Running(stage, open_bus, make=lambda: SimulatedLearner(poison=[name]))
    stage.take_new(0)
    error = running.join()
    assert isinstance(error, NonFinite)
    assert stage.commits() == []


def test_second_trainer_fences_the_first(stage: TrainerStage, open_bus: Callable[[], Bus]) -> None:
    stage.start_run()
    first = Running(stage, open_bus)
    wait_for(lambda: len(incarnations(stage)) == 1)
    second = Running(stage, open_bus)
    wait_for(lambda: len(incarnations(stage)) == 2)
    stage.take_new(0)
    assert isinstance(first.join(), Fenced), "its commit is not in the log"
    wait_for(lambda: len(stage.commits()) == 1)
    second.end()
    assert incarnations(stage) == [0, 1]


def incarnations(stage: TrainerStage) -> list[int]:
    return [event.incarnation for event in stage.control() if isinstance(event, RoleStarted)]


def test_trainer_waits_for_its_run_to_start(
    stage: TrainerStage, open_bus: Callable[[], Bus]
) -> None:
    running = Running(stage, open_bus)
    stage.start_run()
    stage.take_new(0)
    wait_for(lambda: len(stage.commits()) == 1)
    running.end()
    assert incarnations(stage) == [0]


def test_trainer_that_is_stopped_while_it_waits_leaves_no_trace(
    stage: TrainerStage, open_bus: Callable[[], Bus]
) -> None:
    running = Running(stage, open_bus)
    running.end()
    assert stage.control() == []


class HurriedClock(SystemClock):
    def __init__(self) -> None:
        self.ahead_ns = 0

    def now_ns(self) -> int:
        return super().now_ns() + self.ahead_ns

    def sleep(self, seconds: float) -> None:
        self.ahead_ns += int(seconds * 1e9)


def test_run_that_never_starts_is_one_line_with_a_hint(
    stage: TrainerStage, open_bus: Callable[[], Bus]
) -> None:
    error = Running(stage, open_bus, clock=HurriedClock()).join()
    assert isinstance(error, UsageError)
    assert error.message == f"run {RUN} did not start within 120 s"
    assert error.hint is not None


def test_replay_on_another_machine_diverges_and_adopt_goes_on(
    stage: TrainerStage, open_bus: Callable[[], Bus]
) -> None:
    stage.start_run()
    first = Running(stage, open_bus)
    stage.take_new(0)
    wait_for(lambda: len(stage.commits()) == 1)
    first.end()
    other = Running(stage, open_bus, make=lambda: SimulatedLearner(flavour="other"))
    assert isinstance(other.join(), ReplayDiverged)
    adopting = Running(stage, open_bus, make=lambda: SimulatedLearner(flavour="other"), adopt=True)
    stage.take_new(1)
    wait_for(lambda: len(stage.commits()) == 2)
    adopting.end()
    assert [commit.adopted for commit in stage.commits()] == [False, True]
