"""Code of the user's that is not `async` runs in its process's main thread, on every attempt."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    GroupCall,
    GroupRewarded,
    PromptReady,
    Rewarded,
    TaskFailed,
)
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Completion, Turn
from tests.support.task_pool import PATIENCE_S, ask, gather, prompt, score

MODULE = r"""
import os, signal, threading, time
from dora_pipe.producers.tasks.task import Environment, Observation, Retry, Task

tried = set()

def main():
    signal.setitimer(signal.ITIMER_REAL, 0)
    return float(threading.current_thread() is threading.main_thread())

def again(name):
    if name not in tried:
        tried.add(name)
        raise Retry("busy")

def plain(text):
    return main()

def busy(text):
    again(text)
    return main()

async def later(text):
    again(text)
    return 1.0

def lists(texts):
    if "stuck" in texts:
        while True: pass
    return [main() for text in texts]

def group(row, texts):
    again("".join(texts))
    return [main() for text in texts]

def hangs(text):
    if text == "loop":
        while True: pass
    if text == "sleep": time.sleep(1000)
    if text == "catches":
        while True:
            try: time.sleep(1000)
            except BaseException: pass
    return main()

class World(Environment):
    async def reset(self, row):
        return "go"
    async def step(self, text):
        return Observation(text=str(os.getpid()), done=False)
    def reward(self, text, turns):
        return hangs(text)

class Worlds(Task):
    def rows(self, split):
        return [{"prompt": "?"}]
    def environment(self, row):
        return World()
"""


LATE = """
from dora_pipe.producers.tasks.execution import MAIN

serve = MAIN.serve
MAIN.serve = lambda: (time.sleep(1.0), serve())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n')
    return tmp_path


def task(folder: Path, *names: str, limit_s: float = PATIENCE_S) -> model.Task:
    rewards = [model.RewardUse(use=f"mine:{name}", group=name == "group") for name in names]
    return model.Task(
        kind="dataset",
        directory=str(folder),
        data=str(folder / "rows.jsonl"),
        reward=tuple(rewards),
        reward_timeout_s=limit_s,
        environment_timeout_s=limit_s,
    )


@pytest.mark.parametrize(
    "names",
    [("plain",), ("plain", "busy"), ("plain", "later"), ("lists",), ("plain", "lists", "busy")],
)
def test_rewards_run_in_the_main_thread_on_every_attempt(folder: Path, names: Any) -> None:
    with TaskPool(task(folder, *names)) as pool:
        for number in range(8):
            pool.submit(score(f"r{number}", f"text {number}"))
        for event in gather(pool, 8):
            assert isinstance(event, Rewarded)
            assert event.parts == dict.fromkeys(names, 1.0)
        assert pool.deaths == 0


def test_rewards_wait_for_the_main_thread(folder: Path) -> None:
    with (folder / "mine.py").open("a") as module:
        module.write(LATE)
    with TaskPool(task(folder, "plain")) as pool:
        event = ask(pool, score("r", ""))
        assert isinstance(event, Rewarded)
        assert event.reward == 1.0


def test_rewards_of_groups_run_in_the_main_thread_on_every_attempt(folder: Path) -> None:
    completions = tuple(Completion(text=text, turns=(text,)) for text in "ab")
    call = GroupCall(request="g", split="train", index=0, completions=completions)
    with TaskPool(task(folder, "plain", "group")) as pool:
        event = ask(pool, call)
        assert isinstance(event, GroupRewarded)
        assert event.rewards == (1.0, 1.0)


@pytest.mark.parametrize("text", ["loop", "sleep"])
def test_rewards_after_one_that_hung_run_in_the_main_thread(folder: Path, text: str) -> None:
    worlds = replace(task(folder, limit_s=1.0), kind="mine:Worlds", data=[], reward="")
    with TaskPool(worlds) as pool:
        for name in ("bad", "good"):
            assert isinstance(ask(pool, prompt(name)), PromptReady)
        failed = ask(pool, score("bad", text))
        assert isinstance(failed, TaskFailed)
        assert (failed.error, failed.message) == ("TimedOut", "timed out after 1 s")
        observed = ask(pool, EnvStep(request="good", turn=Turn(text="")))
        assert isinstance(observed, EnvObserved)
        scored = ask(pool, score("good", ""))
        assert isinstance(scored, Rewarded)
        assert scored.reward == 1.0


@pytest.mark.parametrize("text", ["loop", "catches"])
def test_what_hangs_is_named_and_nothing_after_it_fails(folder: Path, text: str) -> None:
    with TaskPool(task(folder, "hangs", limit_s=1.0)) as pool:
        for round_ in range(3):
            for number in range(4):
                pool.submit(score(f"r{number}", text if number == 1 else ""))
            events = {event.request: event for event in gather(pool, 4)}
            failed = events.pop("r1")
            assert isinstance(failed, TaskFailed)
            assert (failed.error, failed.message) == ("TimedOut", "timed out after 1 s")
            assert all(isinstance(event, Rewarded) for event in events.values()), round_


def test_function_of_lists_that_hangs_is_named(folder: Path) -> None:
    with TaskPool(task(folder, "plain", "lists", limit_s=1.0)) as pool:
        failed = ask(pool, score("bad", "stuck"))
        assert isinstance(failed, TaskFailed)
        assert (failed.error, failed.message) == ("TimedOut", "timed out after 1 s")
        for number in range(4):
            assert isinstance(ask(pool, score(f"r{number}", "")), Rewarded)
