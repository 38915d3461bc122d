"""`bench paradigms --task tools`: the same work for every paradigm; nothing disturbs its time."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from dora_pipe.bench.paradigms_study import Study, study_of
from dora_pipe.bench.paradigms_tools import LateTasks, Pace
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.tasks.calls import EnvStep, Forget, PromptCall, PromptReady, TaskCall
from dora_pipe.producers.tasks.port import ToolCall, Turn
from tests.support.worker import VirtualClock

SECOND_NS = 1_000_000_000


def quick(task: str = "tools") -> Study:
    return study_of(task, quick=True, steps=None, target=None, workers=2, overrides=(), model=None)


@pytest.mark.slow
@pytest.mark.pure
def test_every_paradigm_trains_as_much_and_the_same_seed_gives_the_same_figures(
    tmp_path: Path,
) -> None:
    study = quick()
    config = study.begin(tmp_path)
    dora, again, sync = (study.run(tmp_path, config, name, 0) for name in ("dora", "dora", "sync"))
    assert dora == again
    assert dora.steps == sync.steps == study.scale.steps
    assert sync.staleness == 0 < dora.staleness <= 2
    assert dora.seconds < sync.seconds
    assert sync.training == pytest.approx(2 * Pace().train_s / sync.seconds)


def test_quick_runs_are_of_the_task_that_has_them() -> None:
    with pytest.raises(UsageError, match="--quick"):
        quick("demo")
    with pytest.raises(UsageError, match="no task 'chess'"):
        quick("chess")


class Process:
    """A task process whose answer comes with the next look."""

    def __init__(self) -> None:
        self.seen: list[TaskCall | Forget] = []

    def start(self, effect: TaskCall | Forget) -> None:
        self.seen.append(effect)

    def poll(self, wait_s: float) -> list[PromptReady]:
        return [PromptReady(request=self.seen[-1].request, text="5", episode=True)]


def late(seed: int = 0) -> tuple[LateTasks, VirtualClock, Process]:
    clock, process = VirtualClock(), Process()
    return LateTasks(clock, process, Pace(), seed=seed), clock, process  # type: ignore[arg-type]


def due_s(tasks: LateTasks, clock: VirtualClock, call: TaskCall) -> float:
    tasks.start(call)
    return (tasks.due_ns() - clock.now_ns()) / SECOND_NS


def test_tools_take_as_long_in_every_paradigm_and_nothing_else_takes_a_while() -> None:
    used = Turn(text="n1", tool_calls=(ToolCall(name="calculator", arguments={"a": 1, "b": 2}),))
    found = []
    for attempt in (0, 1):
        tasks, clock, _ = late()
        found.append(due_s(tasks, clock, EnvStep(request=f"g0000000000-003/{attempt}", turn=used)))
    assert found[0] == found[1] > 0.1
    tasks, clock, _ = late(seed=1)
    assert due_s(tasks, clock, EnvStep(request="g0000000000-003/0", turn=used)) != found[0]
    tasks, clock, _ = late()
    assert due_s(tasks, clock, EnvStep(request="a/0", turn=Turn(text="answer 3"))) < 0.1
    assert due_s(tasks, clock, PromptCall(request="b/0", split="train", index=0)) < 0.1


def test_latencies_are_normal_with_none_below_zero() -> None:
    used = Turn(text="n1", tool_calls=(ToolCall(name="calculator", arguments={}),))
    drawn = []
    for number in range(400):
        tasks, clock, _ = late()
        drawn.append(due_s(tasks, clock, EnvStep(request=f"g{number}/0", turn=used)))
    quick_share = sum(one < 0.1 for one in drawn) / len(drawn)
    assert 0.1 < quick_share < 0.25, "a sixth of N(10, 10) is below 0"
    assert 9 < sum(drawn) / len(drawn) < 12.5


def test_the_process_forgets_who_is_forgotten_and_is_asked_when_the_time_is_over() -> None:
    tasks, clock, process = late()
    call = PromptCall(request="a/0", split="train", index=0)
    tasks.start(call)
    assert not process.seen and not tasks.poll()
    clock.sleep(1.0)
    assert [one.request for one in tasks.poll()] == ["a/0"]
    tasks.start(Forget(request="a/0"))
    assert process.seen == [call, Forget(request="a/0")]
