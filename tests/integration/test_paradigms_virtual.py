"""Tests of `bench paradigms` in virtual time: equal work for every entrant, and resumption."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from dora_pipe.bench.studies.entrants import own_setting
from dora_pipe.bench.studies.paradigms import ParadigmRun
from dora_pipe.bench.studies.paradigms_study import Study, study_of
from dora_pipe.bench.studies.paradigms_virtual import TOOLS, LateTasks
from dora_pipe.core.errors import UsageError
from dora_pipe.producers.tasks.calls import (
    EnvStep,
    Forget,
    PromptCall,
    PromptReady,
    TaskCall,
    TaskEffect,
)
from dora_pipe.producers.tasks.task import ToolCall, Turn
from tests.support.user_run import bench
from tests.support.worker import VirtualClock

SECOND_NS = 1_000_000_000


def quick(out: Path, task: str = "tools") -> Study:
    return study_of(
        out, task, quick=True, steps=None, target=None, workers=2, overrides=(), model=None
    )


def play(study: Study, entrant: str) -> ParadigmRun:
    return study.run(msgspec.structs.replace(own_setting(entrant, study.scale.rate), seed=0))


@pytest.mark.slow
@pytest.mark.pure
def test_every_entrant_trains_as_much_and_the_same_seed_gives_the_same_figures(
    tmp_path: Path,
) -> None:
    study = quick(tmp_path)  # of a model that has learnt nothing: no run comes to its target
    study.begin()
    dora, again, sync, parts = (
        play(study, entry) for entry in ("dora", "dora", "sync", "dora-parts")
    )
    assert dora == again
    assert dora.steps == sync.steps == parts.steps == study.scale.steps
    assert sync.staleness == 0 < dora.staleness <= 2
    assert parts.training == pytest.approx(4 * (TOOLS.train_s + TOOLS.update_s) / parts.seconds)
    assert sync.training == pytest.approx(4 * (TOOLS.train_s / 3 + TOOLS.update_s) / sync.seconds)


@pytest.mark.slow
@pytest.mark.pure
def test_a_study_keeps_what_is_done_and_tells_it_again(tmp_path: Path) -> None:
    words = ["paradigms", "--task", "tools", "--quick", "--out", str(tmp_path / "study")]
    words += ["--only", "dora", "--seeds", "1", "--json"]
    first = bench(tmp_path, *words)
    assert first.returncode == 0, first.stderr
    cells = (tmp_path / "study" / "cells.jsonl").read_bytes()
    assert cells.count(b"\n") == 1
    assert bench(tmp_path, *words).stdout == first.stdout
    assert (tmp_path / "study" / "cells.jsonl").read_bytes() == cells
    other = bench(tmp_path, *words, "-o", "rollout.group_size=4")
    assert other.returncode and "study with other settings" in other.stderr


def test_quick_runs_are_of_the_task_that_has_them(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--quick"):
        quick(tmp_path, "demo")
    with pytest.raises(UsageError, match="no task 'chess'"):
        quick(tmp_path, "chess")


class Process:
    def __init__(self) -> None:
        self.seen: list[TaskEffect] = []

    def start(self, effect: TaskEffect) -> None:
        self.seen.append(effect)

    def poll(self, wait_s: float) -> list[PromptReady]:
        return [PromptReady(request=self.seen[-1].request, text="5", episode=True)]


def late(seed: int = 0) -> tuple[LateTasks, VirtualClock, Process]:
    clock, process = VirtualClock(), Process()
    return LateTasks(clock, process, TOOLS, seed=seed), clock, process  # type: ignore[arg-type]


def due_s(tasks: LateTasks, clock: VirtualClock, call: TaskCall) -> float:
    tasks.start(call)
    return (tasks.due_ns() - clock.now_ns()) / SECOND_NS


def test_tools_take_as_long_for_every_entrant_and_nothing_else_takes_a_while() -> None:
    used = Turn(text="n1", tool_calls=(ToolCall(name="calculator", arguments={"a": 1, "b": 2}),))
    results = []
    for attempt in (0, 1):
        tasks, clock, _ = late()
        results.append(
            due_s(tasks, clock, EnvStep(request=f"g0000000000-003/{attempt}", turn=used))
        )
    assert results[0] == results[1] > 0.1
    tasks, clock, _ = late(seed=1)
    assert due_s(tasks, clock, EnvStep(request="g0000000000-003/0", turn=used)) != results[0]
    tasks, clock, _ = late()
    assert due_s(tasks, clock, EnvStep(request="a/0", turn=Turn(text="answer 3"))) < 0.1
    assert due_s(tasks, clock, PromptCall(request="b/0", split="train", index=0)) < 0.1


def test_latencies_are_normal_with_none_below_zero() -> None:
    used = Turn(text="n1", tool_calls=(ToolCall(name="calculator", arguments={}),))
    drawn = []
    for number in range(400):
        tasks, clock, _ = late()
        drawn.append(due_s(tasks, clock, EnvStep(request=f"g{number}/0", turn=used)))
    quick_share = sum(scenario < 0.1 for scenario in drawn) / len(drawn)
    assert 0.1 < quick_share < 0.25, "a sixth of N(10, 10) is below 0"
    assert 9 < sum(drawn) / len(drawn) < 12.5


def test_the_process_forgets_who_is_forgotten_and_is_asked_when_the_time_is_over() -> None:
    tasks, clock, process = late()
    call = PromptCall(request="a/0", split="train", index=0)
    tasks.start(call)
    assert not process.seen and not tasks.poll()
    clock.sleep(1.0)
    assert [request.request for request in tasks.poll()] == ["a/0"]
    tasks.start(Forget(request="a/0"))
    assert process.seen == [call, Forget(request="a/0")]
