"""Agents in task processes: what they are given, what of it counts, and how they end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config.model import Task
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    AgentEnded,
    EpisodeLost,
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.tasks.pool import TaskPool

AGENT = """
import asyncio, os, signal, time
from dora_pipe.producers.tasks.task import Retry, Reward

async def told(base_url, api_key, row):
    await asyncio.sleep(0)
    return f"{base_url} {api_key} {row['numbers']}"

here = []

def in_thread(base_url):
    here.append(base_url)
    end = time.monotonic() + 60
    while len(here) < 20 and time.monotonic() < end: time.sleep(.01)
    return Reward(value=float(len(here)), parts={"turns": 2.0})

def nothing(): pass
def number(row): return len(row["numbers"])
def fails(row): raise KeyError("no such tool")
def again(row): raise Retry("the sandbox is full")
def odd(row): return object()
def dies(row): os.kill(os.getpid(), signal.SIGKILL)
async def waits(row): await asyncio.sleep(3600)
def strange(model): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


@contextmanager
def pool_of(folder: Path, **task: Any) -> Iterator[TaskPool]:
    options = {"directory": str(folder), "kind": "calculator", **task}
    with TaskPool(Task(**options)) as pool:
        pool.wait()
        yield pool


def call(request: str = "g-0/0", index: int = 0) -> AgentCall:
    return AgentCall(
        request=request, split="train", index=index, base_url="http://here/v1", api_key="key"
    )


def events(pool: TaskPool, count: int = 1, wait_s: float = 90.0) -> list[TaskEvent]:
    events: list[TaskEvent] = []
    end = time.monotonic() + wait_s
    while len(events) < count and time.monotonic() < end:
        events += pool.poll(0.05)
    return events


def test_a_function_is_given_what_it_names(folder: Path) -> None:
    with pool_of(folder, agent="agent:told") as pool:
        pool.submit(call())
        (ended,) = events(pool)
    assert isinstance(ended, AgentEnded)
    assert ended.text is not None
    assert ended.text.startswith("http://here/v1 key [")


def test_plain_functions_run_at_the_same_time(folder: Path) -> None:
    with pool_of(folder, agent="agent:in_thread") as pool:
        for index in range(20):
            pool.submit(call(f"g-0/{index}"))
        ended = events(pool, 20)
    rewarded = [event.rewarded for event in ended if isinstance(event, AgentEnded)]
    assert {reward.reward for reward in rewarded if reward} == {20.0}


@pytest.mark.parametrize(("name", "error"), [("fails", "KeyError"), ("odd", "NoAnswer")])
def test_what_an_agent_raises_is_its_failure(folder: Path, name: str, error: str) -> None:
    with pool_of(folder, agent=f"agent:{name}") as pool:
        pool.submit(call())
        (failed,) = events(pool)
    assert isinstance(failed, TaskFailed)
    assert failed.error == error


def test_none_and_numbers_are_results(folder: Path) -> None:
    with pool_of(folder, agent="agent:nothing") as pool:
        pool.submit(call())
        assert events(pool) == [AgentEnded(request="g-0/0")]
    with pool_of(folder, agent="agent:number") as pool:
        pool.submit(call())
        (ended,) = events(pool)
    assert isinstance(ended, AgentEnded)
    assert ended.rewarded is not None
    assert ended.rewarded.reward >= 2


@pytest.mark.parametrize("name", ["again", "dies"])
def test_what_is_not_the_agents_fault_loses_its_episode(folder: Path, name: str) -> None:
    with pool_of(folder, agent=f"agent:{name}") as pool:
        pool.submit(call())
        (lost,) = events(pool)
        assert isinstance(lost, EpisodeLost)
        pool.submit(call())
        assert [type(event) for event in events(pool)] == [EpisodeLost]


def test_an_agent_that_is_late_is_stopped_and_one_that_is_forgotten_says_nothing(
    folder: Path,
) -> None:
    with pool_of(folder, agent="agent:waits", episode_timeout_s=0.3) as pool:
        pool.submit(call("g-0/0"))
        pool.submit(call("g-0/1"))
        pool.forget("g-0/1")
        (late,) = events(pool)
        assert isinstance(late, TaskFailed)
        assert (late.request, late.error) == ("g-0/0", "TimedOut")
        assert events(pool, wait_s=0.3) == []


def test_an_agent_that_asks_for_something_else_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(ConfigError, match="model"), pool_of(folder, agent="agent:strange"):
        pass
    with pytest.raises(TaskError, match="no `nobody`"), pool_of(folder, agent="agent:nobody"):
        pass


SCRIPT = r"""
echo "$OPENAI_BASE_URL $OPENAI_API_KEY" >&2
case "$1" in
  text) printf '"it is %s"' "$(echo $DORA_PIPE_ROW | cut -c3-9)" > "$DORA_PIPE_RESULT" ;;
  reward) echo '{"value": 0.25, "parts": {"a": 1.0}}' > "$DORA_PIPE_RESULT" ;;
  fails) echo "no model today" >&2; exit 3 ;;
  waits) sleep 3600 & echo $! > pid; wait ;;
esac
"""


def test_a_command_line_has_all_in_its_environment(folder: Path) -> None:
    (folder / "agent.sh").write_text(SCRIPT)
    for word, expected in (("text", "it is numbers"), ("none", None)):
        with pool_of(folder, agent=("sh", "agent.sh", word)) as pool:
            pool.submit(call())
            assert events(pool) == [AgentEnded(request="g-0/0", text=expected)]
    with pool_of(folder, agent=("sh", "agent.sh", "reward")) as pool:
        pool.submit(call())
        (ended,) = events(pool)
    assert isinstance(ended, AgentEnded)
    assert ended.rewarded is not None
    assert (ended.rewarded.reward, ended.rewarded.parts) == (0.25, {"a": 1.0})


def test_a_command_that_fails_says_what_it_wrote_last(folder: Path) -> None:
    (folder / "agent.sh").write_text(SCRIPT)
    with pool_of(folder, agent=("sh", "agent.sh", "fails")) as pool:
        pool.submit(call())
        (failed,) = events(pool)
    assert isinstance(failed, TaskFailed)
    assert failed.error == "AgentFailed"
    assert failed.message.startswith("status 3: http://here/v1 key")
    assert failed.message.endswith("no model today")


def test_a_command_that_is_forgotten_ends_with_all_that_it_started(folder: Path) -> None:
    (folder / "agent.sh").write_text(SCRIPT)
    with pool_of(folder, agent=("sh", "agent.sh", "waits")) as pool:
        pool.submit(call())
        pid = _written(pool, folder / "pid")
        pool.forget("g-0/0")
        end = time.monotonic() + 60
        while _alive(pid) and time.monotonic() < end:
            pool.poll(0.05)
        assert not _alive(pid)


def _written(pool: TaskPool, path: Path) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        pool.poll(0.05)
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
    raise AssertionError("nothing was written")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
