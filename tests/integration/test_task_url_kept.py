"""Episodes at servers of tasks whose worker is killed: the next one finds them by their key, and no
step is lost or done twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    EpisodeLost,
    Forget,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
)
from dora_pipe.producers.tasks.interpreter import TOKEN_VARIABLE
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.port import Turn
from tests.support.task_pool import DEADLINE_S, ask, gather, wait_until_gone
from tests.support.task_server import TOKEN, Server

MODULE = """
import asyncio, os, time
from pathlib import Path
from dora_pipe.producers.tasks.port import Environment, Observation, Reward, Task

HERE = Path(__file__).parent

def note(what):
    with open(HERE / "steps", "a") as file:
        file.write(f"{what}\\n")

class Counter(Environment):
    def reset(self, row):
        self.row, self.total = row, 0
        note(f"reset {row['n']}")
        return f"count from {row['n']}"
    def step(self, text):
        note(f"step {self.row['n']} {text}")
        if text.startswith("wait"):
            while not (HERE / "go").exists():
                time.sleep(0.01)
        self.total += 1
        return Observation(text=f"{text} {self.total} in {os.getpid()}", done=False)
    def reward(self, text, turns):
        return Reward(value=self.total, raw=0.5, parts={"pid": os.getpid()})
    def close(self):
        note(f"close {self.row['n']}")

class AsyncCounter(Counter):
    async def step(self, text):
        note(f"step {self.row['n']} {text}")
        while text.startswith("wait") and not (HERE / "go").exists():
            await asyncio.sleep(0.01)
        self.total += 1
        return Observation(text=f"{text} {self.total} in {os.getpid()}", done=False)
    reward = Environment.reward

class Odd(Task):
    def __init__(self, episodes=True, waits=False):
        self.kind = AsyncCounter if waits else Counter
    def rows(self, split):
        return [{"n": n} for n in range(4)]
    def environment(self, row):
        return self.kind()
    def reward(self, row, text, turns):
        return row["n"] + 10
"""

FIRST = """
import sys
from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import EnvStep, PromptCall
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.port import Turn

url, *turns = sys.argv[1:]
with TaskPool(model.Task(kind="whatever", url=url, environment_timeout_s=20.0), run="r@1") as pool:
    pool.submit(PromptCall(request="g0-0/1", split="train", index=3))
    for turn in [None, *turns]:
        if turn is not None:
            pool.submit(EnvStep(request="g0-0/1", turn=Turn(text=turn)))
        while not (found := pool.poll(0.1)):
            if turn and turn.startswith("wait"):
                print("waits", flush=True)
        print(found[0], flush=True)
    while True:
        pool.poll(0.1)
"""


BEGIN = PromptCall(request="g0-0/1", split="train", index=3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    (tmp_path / "odd_task.py").write_text(MODULE)
    return tmp_path


@pytest.fixture
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Server]:
    opened = Server(folder, *getattr(request, "param", ()))
    yield opened
    if opened.process.returncode is None:
        opened.end(signal.SIGKILL)


class First:
    """A worker's pool in a process of its own."""

    def __init__(self, url: str, *turns: str) -> None:
        words = [sys.executable, "-c", FIRST, url, *turns]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    def until(self, what: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if what in line:
                return
        raise AssertionError(f"it never said {what!r}")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


def pool_of(*urls: str, **keys: Any) -> TaskPool:
    task = model.Task(kind="whatever", url=urls, environment_timeout_s=20.0, **keys)
    return TaskPool(task, run="r@1")


def again(attempt: int = 2) -> PromptCall:
    return PromptCall(request=f"g0-0/{attempt}", split="train", index=3, again=True)


def told(pool: TaskPool, text: str, attempt: int = 2) -> str:
    seen = ask(pool, EnvStep(request=f"g0-0/{attempt}", turn=Turn(text=text)))
    assert isinstance(seen, EnvObserved), seen
    return seen.text


def scored(pool: TaskPool, attempt: int = 2) -> Rewarded:
    call = RewardCall(request=f"g0-0/{attempt}", split="train", index=3, text="", turns=())
    found = ask(pool, call)
    assert isinstance(found, Rewarded)
    return found


def steps(folder: Path) -> list[str]:
    """What environments have done, in order."""
    return (folder / "steps").read_text().splitlines()


def until_steps(folder: Path, *wanted: str) -> None:
    end = time.monotonic() + DEADLINE_S
    while steps(folder) != [*wanted] and time.monotonic() < end:
        time.sleep(0.02)
    assert steps(folder) == [*wanted]


KINDS = [(), ("-o", "task.options.waits=true")]


@pytest.mark.parametrize("server", KINDS, indirect=True, ids=["threads", "async"])
def test_episode_of_a_killed_worker_goes_on_where_it_was_and_no_step_is_done_twice(
    folder: Path, server: Server
) -> None:
    first = First(server.url, "a", "b", "wait")
    first.until("waits")
    first.kill()
    with pool_of(server.url) as pool:
        begun = ask(pool, again())
        assert isinstance(begun, PromptReady)
        assert (begun.text, begun.found, begun.kept) == ("count from 3", True, True)
        assert told(pool, "a").startswith("a 1 in ")
        assert told(pool, "b").startswith("b 2 in ")
        pool.submit(EnvStep(request="g0-0/2", turn=Turn(text="wait")))
        assert pool.poll(0.2) == [], "it is still in the step that nobody has acknowledged"
        (folder / "go").touch()
        (seen,) = gather(pool, 1)
        assert isinstance(seen, EnvObserved)
        assert seen.text.startswith("wait 3 in ")
        pid = int(seen.text.split()[-1])
        assert told(pool, "c") == f"c 4 in {pid}"
        found = scored(pool)
        own = "task.options.waits=true" not in server.words
        assert found.reward == (4.0 if own else 13.0)
        assert found.parts == ({"pid": pid} if own else {})
        pool.start(Forget(request="g0-0/2"))
        until_steps_of = ["reset 3", "step 3 a", "step 3 b", "step 3 wait", "step 3 c", "close 3"]
        pool.poll(0.1)
        until_steps(folder, *until_steps_of)
        assert wait_until_gone(pid), "nobody needs the process any more"


def test_connection_that_is_lost_costs_no_step_either(folder: Path, server: Server) -> None:
    with pool_of(server.url) as pool:
        assert isinstance(ask(pool, BEGIN), PromptReady)
        said = told(pool, "a", attempt=1)
        for child in pool._children:
            child.link.kill()
        (lost,) = gather(pool, 1)
        assert isinstance(lost, EpisodeLost)
        begun = ask(pool, again(1))
        assert isinstance(begun, PromptReady)
        assert begun.found
        assert told(pool, "a", attempt=1) == said
        assert told(pool, "b", attempt=1).startswith("b 2 in ")
    assert steps(folder) == ["reset 3", "step 3 a", "step 3 b"]


def test_later_attempt_takes_an_episode_from_a_worker_that_only_seems_dead(
    folder: Path, server: Server
) -> None:
    with pool_of(server.url) as late, pool_of(server.url) as pool:
        assert isinstance(ask(late, BEGIN), PromptReady)
        said = told(late, "a", attempt=1)
        assert isinstance(ask(pool, again()), PromptReady)
        assert told(pool, "a") == said
        lost = ask(late, EnvStep(request="g0-0/1", turn=Turn(text="b")))
        assert isinstance(lost, EpisodeLost)
        assert "a later attempt has it" in lost.message
        assert told(pool, "b").startswith("b 2 in ")
    assert steps(folder) == ["reset 3", "step 3 a", "step 3 b"]


def test_episode_that_is_told_something_else_begins_again(folder: Path, server: Server) -> None:
    first = First(server.url, "a")
    first.until("a 1 in")
    first.kill()
    with pool_of(server.url) as pool:
        assert isinstance(ask(pool, again()), PromptReady)
        lost = ask(pool, EnvStep(request="g0-0/2", turn=Turn(text="other")))
        assert isinstance(lost, EpisodeLost)
        assert "it was told another turn 0 before" in lost.message
        begun = ask(pool, again())
        assert isinstance(begun, PromptReady)
        assert not begun.found
    assert steps(folder) == ["reset 3", "step 3 a", "close 3", "reset 3"]


@pytest.mark.parametrize("server", [("--keep", "0.5")], indirect=True)
def test_episode_that_nobody_claims_is_closed_after_a_while(folder: Path, server: Server) -> None:
    first = First(server.url, "a")
    first.until("a 1 in")
    first.kill()
    until_steps(folder, "reset 3", "step 3 a", "close 3")
    with pool_of(server.url) as pool:
        begun = ask(pool, again())
        assert isinstance(begun, PromptReady)
        assert not begun.found


@pytest.mark.parametrize("server", [("--keep", "0")], indirect=True)
def test_server_that_keeps_nothing_ends_episodes_with_their_connection(
    folder: Path, server: Server
) -> None:
    first = First(server.url, "a")
    first.until("a 1 in")
    first.kill()
    with pool_of(server.url) as pool:
        begun = ask(pool, again())
        assert isinstance(begun, PromptReady)
        assert not (begun.kept or begun.found)


def test_episode_is_looked_for_at_every_server(folder: Path, server: Server) -> None:
    other = Server(folder)
    first = First(other.url, "a")
    first.until("a 1 in")
    first.kill()
    with pool_of(server.url, other.url, processes=2) as pool:
        begun = ask(pool, again())
        assert isinstance(begun, PromptReady)
        assert begun.found
        assert told(pool, "a").startswith("a 1 in ")
    other.end(signal.SIGKILL)
    assert steps(folder) == ["reset 3", "step 3 a"]


def test_processes_that_keep_episodes_take_no_place_of_others(folder: Path) -> None:
    server = Server(folder, "--processes", "1")
    for at in range(3):
        first = First(server.url, f"{at}")
        first.until(f"{at} 1 in")
        first.kill()
    with pool_of(server.url) as pool:
        begun = ask(pool, again())
        assert isinstance(begun, PromptReady)
        assert begun.found
        assert told(pool, "2").startswith("2 1 in "), "as many as there are places, the newest ones"
    assert server.end() == 0


def test_worker_that_leaves_gives_episodes_to_others_and_ends_what_it_has_done_with(
    folder: Path, server: Server
) -> None:
    with pool_of(server.url) as pool:
        assert isinstance(ask(pool, BEGIN), PromptReady)
        told(pool, "a", attempt=1)
        pool.start(Forget(request="g0-0/1", keep=True))
        pool.submit(PromptCall(request="g1-0/1", split="train", index=2))
        assert isinstance(gather(pool, 1)[0], PromptReady)
        pool.start(Forget(request="g1-0/1"))
        pool.poll(0.1)
    with pool_of(server.url) as pool:
        begun = ask(pool, again())
        assert isinstance(begun, PromptReady)
        assert begun.found
        until_steps(folder, "reset 3", "step 3 a", "reset 2", "close 2")
        os.kill(int(told(pool, "a").split()[-1]), signal.SIGKILL)
        lost = ask(pool, EnvStep(request="g0-0/2", turn=Turn(text="b")))
        assert isinstance(lost, EpisodeLost)
        assert "the process that kept it has ended" in lost.message
