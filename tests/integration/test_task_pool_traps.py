"""Tests of task code that blocks or kills its process: the error names it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks import pool as pool_module
from dora_pipe.producers.tasks.calls import Rewarded, TaskFailed
from dora_pipe.producers.tasks.pool import TaskPool
from tests.support.task_pool import (
    DEADLINE_S,
    LIMIT_S,
    gather,
    is_gone,
    pid_of,
    poll_until,
    score,
    task,
    wait_until_gone,
    write_module,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_module(tmp_path)


@pytest.fixture
def pool(folder: Path) -> Iterator[TaskPool]:
    with TaskPool(task(folder)) as opened:
        opened.wait()
        yield opened


@pytest.fixture
def impatient(folder: Path) -> Iterator[TaskPool]:
    with TaskPool(task(folder, limit_s=LIMIT_S)) as opened:
        opened.wait()
        yield opened


def test_while_true_reward_is_killed_and_the_others_are_scored(impatient: TaskPool) -> None:
    before = pid_of(impatient)
    for name, text in (("a", "one"), ("bad", "forever"), ("c", "one"), ("d", "one")):
        impatient.submit(score(name, text))
    events = {event.request: event for event in gather(impatient, 4)}
    assert events["bad"] == TaskFailed(
        request="bad", error="TimedOut", message=f"timed out after {LIMIT_S:g} s"
    )
    assert all(isinstance(events[name], Rewarded) for name in "acd")
    assert impatient.deaths == 1
    assert is_gone(before)
    assert pid_of(impatient) != before


@pytest.mark.parametrize(("text", "end"), [("die", "status 7"), ("crash", "signal 11")])
def test_process_killed_by_a_reward_blames_that_call_alone(
    pool: TaskPool, text: str, end: str
) -> None:
    for name, what in (("a", "one"), ("bad", text), ("c", "one")):
        pool.submit(score(name, what))
    events = {event.request: event for event in gather(pool, 3)}
    failed = events["bad"]
    assert isinstance(failed, TaskFailed)
    assert failed.error == "ProcessDied"
    assert end in failed.message
    assert isinstance(events["a"], Rewarded)
    assert isinstance(events["c"], Rewarded)


def test_process_that_dies_idle_is_replaced_without_an_event(pool: TaskPool) -> None:
    before = pid_of(pool)
    os.kill(before, signal.SIGKILL)
    assert wait_until_gone(before)
    assert pool.poll(wait_s=0.1) == []
    assert pid_of(pool) != before


def test_what_a_hanging_reward_started_is_killed_with_it(impatient: TaskPool) -> None:
    parent = pid_of(impatient)
    impatient.submit(score("a", "orphan"))
    impatient.poll()
    end = time.monotonic() + DEADLINE_S
    results: list[int] = []
    while not results and time.monotonic() < end:
        results = _sleepers(parent)
    (event,) = gather(impatient, 1)
    assert isinstance(event, TaskFailed)
    assert results
    assert poll_until(impatient, lambda: all(map(is_gone, results)))


def _sleepers(parent: int) -> list[int]:
    results = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"1000.{parent}" in (entry / "cmdline").read_text():
                results.append(int(entry.name))
        except OSError:
            continue
    return results


def test_processes_that_die_without_answering_end_the_pool_with_the_reason(
    pool: TaskPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "DEATHS_MAX", 3)
    monkeypatch.setattr("dora_pipe.producers.tasks.servers.BACKOFF_FIRST_S", 0.01)
    for number in range(3):
        pool.submit(score(f"r{number}", "die"))
    with pytest.raises(TaskError, match=r"3 consecutive task processes .* status 7"):
        gather(pool, 4)


def test_task_processes_die_with_a_parent_that_is_killed_in_the_middle_of_a_hang(
    folder: Path,
) -> None:
    program = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.support.task_pool import *
pool = TaskPool(task(__import__("pathlib").Path({str(folder)!r})))
pool.wait()
print(pid_of(pool), flush=True)
pool.submit(score("a", "forever"))
pool.poll()
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = int(parent.stdout.readline())
        assert not is_gone(child)
        parent.kill()
        parent.wait()
    assert wait_until_gone(child)
