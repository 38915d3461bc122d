"""A task whose calls fail one after the other for what is outside: it is left alone and named."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from dora_pipe.producers.tasks import pool as pool_module
from dora_pipe.producers.tasks.calls import EnvStep, PromptReady, Rewarded, TaskEvent, TaskFailed
from dora_pipe.producers.tasks.child import DEATHS_OF_CALL_MAX
from dora_pipe.producers.tasks.links import KILLED
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Turn
from dora_pipe.schemas.metrics import FailingServer
from tests.support.task_pool import (
    DEADLINE_S,
    LIMIT_S,
    ask,
    gather,
    prompt,
    score,
    task,
    write_module,
)

BAD = 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pool_module, "BAD_MAX", BAD)
    return write_module(tmp_path)


def the_place(pool: TaskPool) -> FailingServer:
    (server,) = pool.failing
    assert (server.task, server.url) == ("odd_task:Odd", "")
    assert server.reason.startswith(f"{BAD} consecutive calls failed, the last with TimedOut")
    assert server.since_ns > 0
    return server


def test_rewards_that_hang_one_after_the_other_leave_the_task_alone_until_one_works(
    folder: Path,
) -> None:
    with TaskPool(task(folder, limit_s=LIMIT_S)) as pool:
        for index in range(BAD):
            assert pool.failing == []
            failed = ask(pool, score(str(index), "forever"))
            assert isinstance(failed, TaskFailed)
            assert failed.error == "TimedOut"
        assert the_place(pool).failures == 1
        assert isinstance(ask(pool, score("c", "one")), Rewarded), "asked again after a while"
        assert pool.failing == []


def test_steps_that_hang_count_although_every_episode_begins(folder: Path) -> None:
    with TaskPool(task(folder, limit_s=LIMIT_S, episodes=True)) as pool:
        for name in "ab":
            assert isinstance(ask(pool, prompt(name)), PromptReady)
            failed = ask(pool, EnvStep(request=name, turn=Turn(text="sleep for ever")))
            assert isinstance(failed, TaskFailed)
        assert the_place(pool).failures == 1
        assert isinstance(ask(pool, prompt("c")), PromptReady)
        assert pool.failing, "an episode that has begun shows nothing"
        ask(pool, EnvStep(request="c", turn=Turn(text="go")))
        assert pool.failing == []


def kill_the_process(pool: TaskPool, *, begun: bool) -> list[TaskEvent]:
    end = time.monotonic() + DEADLINE_S
    while not any(child.begun or (child.sent and not begun) for child in pool._children):
        assert time.monotonic() < end
        assert pool.poll(0.05) == []
    (child,) = pool._children
    assert child.link.process is not None
    os.kill(child.link.process.pid, signal.SIGKILL)
    events: list[TaskEvent] = []
    while child in pool._children:
        assert time.monotonic() < end
        events += pool.poll(0.05)
    return events


def test_a_reward_whose_process_is_killed_from_outside_is_asked_for_again(folder: Path) -> None:
    with TaskPool(task(folder)) as pool:
        pool.submit(score("a", "slow"))
        heard = kill_the_process(pool, begun=False) or gather(pool, 1)
        assert isinstance(heard[0], Rewarded)


def test_a_call_under_which_processes_are_killed_again_and_again_is_to_blame(folder: Path) -> None:
    with TaskPool(task(folder)) as pool:
        pool.submit(score("a", "forever"))
        events: list[TaskEvent] = []
        for _ in range(DEATHS_OF_CALL_MAX):
            assert events == []
            events = kill_the_process(pool, begun=True)
        (failed,) = events
        assert isinstance(failed, TaskFailed)
        assert (failed.error, failed.message) == ("ProcessDied", KILLED)


def test_what_the_tasks_code_does_wrong_leaves_nobody_alone(folder: Path) -> None:
    with TaskPool(task(folder)) as pool:
        for index in range(2 * BAD):
            assert isinstance(ask(pool, score(str(index), "raise")), TaskFailed)
        assert pool.failing == []
