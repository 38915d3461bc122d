"""Tests of steps in threads: a blocked step or main thread delays no other episode."""

from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.producers.tasks import child as child_module
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    EpisodeLost,
    PromptReady,
    Rewarded,
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Turn
from tests.support.task_pool import PATIENCE_S, ask, gather, is_gone, poll_until, prompt, score

MODULE = r"""
import asyncio, os, re, threading, time
from dora_pipe.producers.tasks.task import Environment, Observation, Retry, Task

at_once, most = 0, 0

def slow(seconds, others=0):
    global at_once, most
    at_once += 1
    most = max(most, at_once)
    time.sleep(seconds)
    end = time.monotonic() + 60
    while most < others and time.monotonic() < end: time.sleep(.01)
    at_once -= 1

class Plain(Environment):
    def reset(self, row):
        self.turns = 0
        return "go"
    def step(self, text):
        self.turns += 1
        what, _, rest = text.partition(" ")
        if what == "sleep": slow(float(rest))
        if what == "meet": slow(0.0, int(rest))
        if what == "loop":
            while True: pass
        if what == "retry": raise Retry("no room")
        return Observation(text=f"{self.turns} {os.getpid()}", done=False)

class Waits(Environment):
    async def reset(self, row):
        return "go"
    async def step(self, text):
        await asyncio.sleep(float(text))
        return Observation(text=f"{os.getpid()}", done=False)

class Mixed(Task):
    def rows(self, split):
        return [{"kind": "plain"}, {"kind": "waits"}]
    def prompt(self, row):
        return "go"
    def environment(self, row):
        return Waits() if row["kind"] == "waits" else Plain()
    def reward(self, row, text, turns):
        what, _, rest = text.partition(" ")
        if what == "most": return most
        if what == "threads": return threading.active_count()
        if what == "sleep": slow(float(rest))
        if what == "hang": time.sleep(1000)
        if what == "hold": re.match(r"(a+)+$", "a" * 64 + "b")  # lets no other thread run
        return 1.0
"""

PLAIN, WAITS = 0, 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mixed_task.py").write_text(MODULE)
    return tmp_path


def task(folder: Path, *, limit_s: float = PATIENCE_S, **keys: Any) -> model.Task:
    limits: dict[str, Any] = {"reward_timeout_s": limit_s, "environment_timeout_s": limit_s}
    return model.Task(kind="mixed_task:Mixed", directory=str(folder), **limits, **keys)


def step(request: str, text: str) -> EnvStep:
    return EnvStep(request=request, turn=Turn(text=text))


def begin(pool: TaskPool, *requests: str, index: int = PLAIN) -> None:
    for request in requests:
        pool.submit(prompt(request, index))
    assert all(isinstance(ready, PromptReady) for ready in gather(pool, len(requests)))


def steps(pool: TaskPool, requests: list[str], text: str) -> list[TaskEvent]:
    for request in requests:
        pool.submit(step(request, text))
    return gather(pool, len(requests))


def test_steps_of_a_hundred_episodes_are_made_at_the_same_time(folder: Path) -> None:
    names = [f"r{number}" for number in range(100)]
    with TaskPool(task(folder)) as pool:
        begin(pool, *names)
        observed = steps(pool, names, "meet 100")
        assert all(isinstance(observed, EnvObserved) for observed in observed)
        assert ask(pool, score("ask", "most")) == Rewarded(
            request="ask", reward=100.0, raw=None, parts={}
        )


def test_one_thread_means_the_main_thread_in_order(folder: Path) -> None:
    with TaskPool(task(folder, threads=1)) as pool:
        begin(pool, "a", "b", "c")
        observed = steps(pool, ["b", "a", "c"], "sleep 0.05")
        assert [request.request for request in observed] == ["b", "a", "c"]
        most = ask(pool, score("ask", "most"))
        assert isinstance(most, Rewarded)
        assert most.reward == 1


def test_step_that_loops_for_ever_is_ended_with_its_thread(folder: Path) -> None:
    with TaskPool(task(folder, limit_s=1.0)) as pool:
        begin(pool, "bad", "other")
        before = ask(pool, score("ask", "threads"))
        late = ask(pool, step("bad", "loop"))
        assert isinstance(late, TaskFailed)
        assert (late.error, late.message) == ("TimedOut", "timed out after 1 s")
        assert isinstance(ask(pool, step("other", "")), EnvObserved)
        after = ask(pool, score("ask", "threads"))
        assert isinstance(before, Rewarded)
        assert isinstance(after, Rewarded)
        assert after.reward <= before.reward + 1
        assert pool.deaths == 0


def test_reward_that_hangs_in_the_main_thread_leaves_others_their_episodes(folder: Path) -> None:
    with TaskPool(task(folder, limit_s=1.0)) as pool:
        begin(pool, "plain")
        begin(pool, "waits", index=WAITS)
        observed = ask(pool, step("waits", "0"))
        assert isinstance(observed, EnvObserved)
        pool.submit(score("bad", "hang"))
        pool.submit(score("behind", ""))
        events = {request.request: request for request in gather(pool, 2)}
        assert isinstance(events["bad"], TaskFailed)
        assert events["bad"].error == "TimedOut"
        assert isinstance(events["behind"], Rewarded)
        for name in ("waits", "plain"):
            again = ask(pool, step(name, "0"))
            assert isinstance(again, EnvObserved)
            assert again.text.endswith(observed.text)  # the process where they were
        assert pool.deaths == 0
        begin(pool, "fresh")  # another one takes what is new
        fresh = ask(pool, step("fresh", ""))
        assert isinstance(fresh, EnvObserved)
        assert not fresh.text.endswith(observed.text)
        for name in ("waits", "plain"):
            assert isinstance(ask(pool, score(name, "")), Rewarded)
        # With its last episode the old one ends.
        assert poll_until(pool, lambda: is_gone(int(observed.text)))
        assert isinstance(ask(pool, step("fresh", "")), EnvObserved)


def test_process_that_cannot_go_on_beside_what_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(child_module, "ABANDON_S", 1.0)
    with TaskPool(task(folder, limit_s=1.0)) as pool:
        begin(pool, "other")
        pool.submit(score("bad", "hold"))
        events = {request.request: request for request in gather(pool, 2)}
        assert isinstance(events["bad"], TaskFailed)
        assert isinstance(events["other"], EpisodeLost)
        assert pool.deaths == 1
        begin(pool, "other")


def test_step_that_raises_retry_for_good_loses_its_episode(folder: Path) -> None:
    with TaskPool(task(folder)) as pool:
        for _ in range(2):
            begin(pool, "a")
            observed = ask(pool, step("a", ""))
            assert isinstance(observed, EnvObserved)
            assert observed.text.startswith("1 ")  # from its beginning
            lost = ask(pool, step("a", "retry"))
            assert isinstance(lost, EpisodeLost)
            assert lost.message == "Retry: no room"


@pytest.mark.parametrize("threads", [1, 8])
def test_episode_that_takes_too_long_ends_by_its_name(folder: Path, threads: int) -> None:
    with TaskPool(task(folder, threads=threads, episode_timeout_s=2.0)) as pool:
        begin(pool, "slow")
        cut = ask(pool, step("slow", "sleep 1000"))
        assert isinstance(cut, TaskFailed)
        assert (cut.error, cut.message) == ("EpisodeTimeout", "the episode took longer than 2 s")
