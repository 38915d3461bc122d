"""The worker as a role: real task processes, tokenizer, SQLite log; a simulated engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from dora_pipe.bus.memory import AppendFault, MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import ConfigError, Fenced, PolicyError, ResourceError, TaskError
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.registry import reward_digest
from dora_pipe.producers.worker.role import REJOINS_MAX
from dora_pipe.schemas.control import (
    RunStarted,
    TrajectoriesLogged,
    TrajectoryLogged,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
)
from dora_pipe.schemas.rounds import Fence, StopRun
from tests.support.bus_steps import ScriptedFaults
from tests.support.worker import TOPICS
from tests.support.worker_run import Run, task_of_the_run

ENDLESS = """
from dora_pipe.producers.tasks.arithmetic import Arithmetic

class Endless(Arithmetic):
    def __init__(self, **options):
        super().__init__(**options)
        self.first = self.rows("train")[0]
    def reward(self, row, text, turns):
        while row == self.first:
            pass
        return 1.0
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    bus = SqliteBus(tmp_path / "log.sqlite")
    yield Run(bus, tmp_path)
    bus.close()


def _until(done: Callable[[], bool]) -> Iterator[bool]:
    while not done():
        yield False


def _joined(
    run: Run,
    then: Callable[[int, WorkerJoined], None] = lambda incarnation, joined: None,
    *,
    stop: bool,
) -> Iterator[bool]:
    yield from _until(lambda: len(run.joins()) >= 1)
    then(*run.joins()[0])
    while True:
        yield stop


def test_worker_joins_serves_and_leaves_when_the_run_ends(run: Run) -> None:
    def script() -> Iterator[bool]:
        yield False
        run.begin()
        yield from _until(lambda: len(run.joins()) == 1)
        incarnation, _ = run.joins()[0]
        run.decide(run.assign(incarnation), run.place(incarnation))
        yield from _until(lambda: len(run.facts(TrajectoryLogged)) == 1)
        run.decide(StopRun(reason="done"))
        while True:
            yield False

    run.work(script())
    kinds = [type(event) for event in run.control()]
    assert kinds == [RunStarted, WorkerJoined, WorkerReady, TrajectoriesLogged, WorkerLeft]
    incarnation, joined = run.joins()[0]
    assert (joined.worker, joined.slots, joined.prefetch, joined.kv_tokens) == ("w0", 4, 2, 1024)
    assert joined.engine == "simulated" and "batch_invariant" in joined.declares
    assert joined.assets_digest == run.assets_digest
    assert joined.reward_digest == reward_digest(task_of_the_run())
    logged = run.facts(TrajectoryLogged)[0]
    assert logged.incarnation == incarnation and logged.valid
    trajectory = run.trajectory(logged)
    assert trajectory.token_ids[0] == 1  # the tokenizer's <bos>
    assert trajectory.meta.prompt_tokens > 2


def test_reward_that_never_ends_makes_an_invalid_trajectory_and_the_worker_goes_on(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "endless_task.py").write_text(ENDLESS)
    task = msgspec.structs.replace(
        run.config.task, kind="endless_task:Endless", directory=str(tmp_path), reward_timeout_s=0.3
    )
    run.config = msgspec.structs.replace(run.config, task=task)
    run.begin()

    def script() -> Iterator[bool]:
        yield from _until(lambda: len(run.joins()) == 1)
        incarnation, _ = run.joins()[0]
        run.decide(run.assign(incarnation), run.place(incarnation, 0), run.place(incarnation, 1))
        yield from _until(lambda: len(run.facts(TrajectoryLogged)) == 2)
        while True:
            yield True

    run.work(script())
    logged = run.facts(TrajectoryLogged)
    assert sorted((fact.valid, fact.reward) for fact in logged) == [(False, None), (True, 1.0)]
    assert len(run.facts(WorkerLeft)) == 1


def test_fenced_worker_joins_again_under_a_new_incarnation_and_serves(run: Run) -> None:
    run.begin()

    def script() -> Iterator[bool]:
        yield from _until(lambda: len(run.joins()) == 1)
        run.decide(Fence(reason="lease", worker="w0", incarnation=run.joins()[0][0]))
        yield from _until(lambda: len(run.joins()) == 2)
        incarnation, _ = run.joins()[1]
        run.decide(run.assign(incarnation), run.place(incarnation))
        yield from _until(lambda: len(run.facts(TrajectoryLogged)) == 1)
        while True:
            yield True

    run.work(script())
    (first, event), (second, two) = run.joins()
    assert event.instance != two.instance
    logged = run.facts(TrajectoryLogged)[0]
    assert logged.incarnation == second != first
    assert len(run.engines) == 2
    assert [event.incarnation for event in run.facts(WorkerLeft)] == [second]


def test_fenced_worker_whose_name_was_taken_ends_instead(run: Run) -> None:
    run.begin()

    def take_the_name(incarnation: int, joined: WorkerJoined) -> None:
        other = msgspec.structs.replace(joined, instance="other", host="elsewhere", pid=7)
        run.append(TOPICS.control, other)
        run.decide(Fence(reason="lease", worker="w0", incarnation=incarnation))

    with pytest.raises(Fenced, match=r"another process \(elsewhere, pid 7\) joined as worker w0"):
        run.work(_joined(run, take_the_name, stop=False))
    assert len(run.joins()) == 2


def test_worker_that_is_fenced_again_and_again_gives_up(run: Run) -> None:
    run.begin()

    def script() -> Iterator[bool]:
        for number in range(REJOINS_MAX + 1):
            yield from _until(lambda: len(run.joins()) == number + 1)  # noqa: B023
            run.decide(Fence(reason="lease", worker="w0", incarnation=run.joins()[-1][0]))
        while True:
            yield False

    with pytest.raises(Fenced, match=f"fenced {REJOINS_MAX + 1} times"):
        run.work(script())


@pytest.mark.parametrize(
    ("digest", "error", "why"),
    [
        ("dataset_digest", TaskError, "data set differs here"),
        ("eval_digest", TaskError, "evaluation data differs here"),
        ("assets_digest", PolicyError, "no config and tokenizer files"),
    ],
)
def test_worker_with_other_data_or_without_the_runs_tokenizer_does_not_join(
    run: Run, digest: str, error: type[Exception], why: str
) -> None:
    run.begin(**{digest: "0" * 64})
    with pytest.raises(error, match=why):
        run.work(_until(lambda: False))
    assert run.joins() == []


def test_worker_with_a_name_that_is_none_ends_before_it_joins(run: Run) -> None:
    run.begin()
    with pytest.raises(ConfigError, match="not a worker's name: 'wörker'") as error:
        run.work(_until(lambda: False), worker="wörker")
    assert "letters, digits" in (error.value.hint or "")
    assert run.joins() == []


def test_worker_that_is_fenced_for_its_name_ends_with_that_line_and_joins_no_more(run: Run) -> None:
    run.begin()

    fence = Fence(reason="not a worker's name: 'w0'", worker="w0", incarnation=0)
    with pytest.raises(ConfigError, match="not a worker's name: 'w0'"):
        run.work(
            _joined(
                run,
                lambda incarnation, _: run.decide(
                    msgspec.structs.replace(fence, incarnation=incarnation)
                ),
                stop=False,
            )
        )
    assert len(run.joins()) == 1


def test_worker_that_cannot_load_its_version_leaves_with_the_reason(run: Run) -> None:
    run.begin()

    def assign(incarnation: int, _: WorkerJoined) -> None:
        run.decide(msgspec.structs.replace(run.assign(incarnation), digest=""))

    with pytest.raises(PolicyError, match="cannot host version 0"):
        run.work(_joined(run, assign, stop=False))
    remaining = run.facts(WorkerLeft)
    assert len(remaining) == 1 and "cannot host version 0" in remaining[0].reason


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ResourceError("its server ended by SIGKILL"), "its server ended by SIGKILL"),
        (OSError(5, "Input/output error"), "Input/output error"),
        (RuntimeError("CUDA out of memory"), "RuntimeError: CUDA out of memory"),
        (MemoryError(), "MemoryError"),
    ],
    ids=lambda exception: type(exception).__name__ if isinstance(exception, Exception) else "",
)
def test_what_fails_here_while_weights_are_loaded_ends_this_worker_as_its_own_fault(
    error: Exception, text: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.begin()

    def ended(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(SimulatedEngine, "load", ended)

    with pytest.raises(ResourceError, match=f"cannot host version 0: .*{text}"):
        run.work(
            _joined(run, lambda incarnation, _: run.decide(run.assign(incarnation)), stop=False)
        )
    remaining = run.facts(WorkerLeft)
    assert len(remaining) == 1 and text in remaining[0].reason


@pytest.mark.parametrize("lands", [0, 1])
def test_unknown_outcome_of_joining_is_looked_up_in_the_log(tmp_path: Path, lands: int) -> None:
    log = MemoryLog()
    run = Run(MemoryBus(log), tmp_path)
    run.begin()
    faults = ScriptedFaults(appends={0: AppendFault(kind="unknown", lands=lands)})
    witness, run.bus = run.bus, MemoryBus(log, faults=faults)

    run.work(_joined(run, stop=True))
    run.bus = witness
    assert len(run.joins()) == 1
    assert [event.incarnation for event in run.facts(WorkerLeft)] == [run.joins()[0][0]]
