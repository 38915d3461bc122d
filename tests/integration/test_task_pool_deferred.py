"""Tests of awaiting calls: they overlap, end and are retried independently."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

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
from dora_pipe.producers.tasks.task import Completion, ToolCall, Turn
from tests.support.task_pool import (
    DEADLINE_S,
    PATIENCE_S,
    ask,
    gather,
    prompt,
    score,
    wait_until_gone,
)

MODULE = '''
import asyncio, os, random, sys, time
from dora_pipe.producers.tasks.task import Environment, Observation, Retry, Task

tried = {}

class RateLimited(Retry):
    pass

class Slow(Environment):
    async def reset(self, row):
        await asyncio.sleep(0.01)
        return "go"
    async def respond(self, turn):
        await asyncio.sleep(float(turn.text))
        return Observation(text="slept", done=False)
    async def reward(self, text, turns):
        return None
    async def close(self):
        await asyncio.sleep(0.01)
        print("closed", file=sys.stderr, flush=True)

def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: Other.
    """
    return a + b

def hang() -> None:
    """Hang."""
    time.sleep(1000)

async def fetch(name: str) -> str:
    """Fetch a text that is not always there."""
    tried[name] = tried.get(name, 0) + 1
    if tried[name] < 2: raise Retry("busy")
    await asyncio.sleep(0.3)
    return f"text of {name}"

class Tools(Task):
    def rows(self, split):
        return [{"question": "1 + 2?"}]
    def prompt(self, row):
        return [{"role": "user", "content": [{"type": "text", "text": row["question"]}]}]
    def tools(self, row):
        return [add, hang, fetch]
    def score(self, row, completion):
        return float(completion.messages[-1]["content"] == "3")

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

async def bad_task():
    sys.exit(3)

class Awaits(Task):
    def __init__(self, episodes=False):
        self.episodes = episodes
    def rows(self, split):
        return [{"n": n} for n in range(8)]
    async def prompt(self, row):
        return f"row {row['n']}"
    def environment(self, row):
        return Slow() if self.episodes else None
    def reward(self, row, text, turns):
        what, _, rest = text.partition(" ")
        if what == "pid": return os.getpid()
        if what == "die": os._exit(7)
        if what == "busy": return time.sleep(float(rest)) or 1.0
        if what == "flaky":  # "flaky NAME TIMES"
            name, times = rest.split()
            tried[name] = tried.get(name, 0) + 1
            if tried[name] <= int(times): raise RateLimited(f"try {tried[name]} of {name}")
            return float(tried[name])
        return self.judged(what, rest)
    async def judged(self, what, rest):
        if what == "sleep": await asyncio.sleep(float(rest))
        if what == "raise": raise ValueError("no")
        if what == "exit": sys.exit(3)
        if what == "exit in a task": await asyncio.create_task(bad_task())
        if what == "block": time.sleep(float(rest))
        if what == "later":
            await asyncio.sleep(0.2)
            self.reward({}, rest, ())
        if what == "stubborn": await stubborn()
        if what == "mixed":
            await asyncio.sleep(random.random() * 0.05)
            return self.reward({}, rest, ())
        return 1.0
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "awaiting_task.py").write_text(MODULE)
    return tmp_path


def task(folder: Path, *, limit_s: float = PATIENCE_S, episodes: bool = False) -> model.Task:
    return model.Task(
        kind="awaiting_task:Awaits",
        directory=str(folder),
        options={"episodes": episodes},
        reward_timeout_s=limit_s,
        environment_timeout_s=limit_s,
    )


def named(events: list[TaskEvent]) -> dict[str, TaskEvent]:
    return {event.request: event for event in events}


def test_sixty_four_rewards_of_two_seconds_take_one_process_two_seconds(folder: Path) -> None:
    with TaskPool(task(folder)) as pool:
        pool.wait()
        started = time.monotonic()
        for number in range(64):
            pool.submit(score(f"r{number}", "sleep 2"))
        quick = 0
        while pool.pending > 1:  # quick calls continue meanwhile
            quick += isinstance(ask_beside(pool, "quick", "pid"), Rewarded)
        took_s = time.monotonic() - started
    assert 2.0 <= took_s < 32.0  # One after the other would be 128 s.
    assert quick > 3


def ask_beside(pool: TaskPool, request: str, text: str) -> TaskEvent | None:
    pool.submit(score(request, text))
    result = None
    while result is None:
        result = named(pool.poll(wait_s=0.05)).get(request)
        if pool.pending == 0:
            break
    return result


def test_a_deferred_call_that_is_late_fails_alone_and_no_process_dies(folder: Path) -> None:
    with TaskPool(task(folder, limit_s=1.0)) as pool:
        before = ask(pool, score("pid", "pid"))
        pool.submit(score("late", "sleep 60"))
        pool.submit(score("good", "sleep 0.5"))
        events = named(gather(pool, 2))
        assert events["late"] == TaskFailed(
            request="late", error="TimedOut", message="timed out after 1 s"
        )
        assert isinstance(events["good"], Rewarded)
        assert ask(pool, score("pid", "pid")) == before
        assert pool.deaths == 0


@pytest.mark.parametrize(
    ("text", "error"),
    [("raise", "ValueError"), ("exit", "SystemExit"), ("exit in a task", "SystemExit")],
)
def test_what_is_raised_beside_the_others_fails_its_call_alone(
    folder: Path, text: str, error: str
) -> None:
    with TaskPool(task(folder)) as pool:
        pool.submit(score("good", "sleep 0.3"))
        pool.submit(score("bad", text))
        events = named(gather(pool, 2))
        assert isinstance(events["good"], Rewarded)
        bad = events["bad"]
        assert isinstance(bad, TaskFailed)
        assert (bad.error, pool.deaths) == (error, 0)


@pytest.mark.parametrize("text", ["stubborn", "block 60"])
def test_a_process_whose_loop_cannot_be_used_is_replaced(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "ABANDON_S", 0.3)
    with TaskPool(task(folder, limit_s=1.0)) as pool:
        before = ask(pool, score("pid", "pid"))
        assert isinstance(before, Rewarded)
        pool.submit(score("bad", text))
        bad = gather(pool, 1)[0]
        assert isinstance(bad, TaskFailed)
        assert bad.error == "TimedOut"
        pool.poll(wait_s=0.6)
        assert isinstance(ask(pool, score("good", "sleep 0.1")), Rewarded)
        assert pool.deaths == 1
        assert wait_until_gone(int(before.reward))


def test_deferred_calls_of_a_process_that_dies_for_another_are_made_elsewhere(folder: Path) -> None:
    with TaskPool(task(folder)) as pool:
        pool.submit(score("waits", "sleep 0.5"))
        pool.submit(score("bad", "die"))
        events = named(gather(pool, 2))
        bad = events["bad"]
        assert isinstance(bad, TaskFailed)
        assert bad.error == "ProcessDied"
        assert isinstance(events["waits"], Rewarded)


def test_deferred_steps_of_a_process_that_dies_are_lost_with_their_episodes(folder: Path) -> None:
    with TaskPool(task(folder, episodes=True)) as pool:
        for name in ("waits", "bad"):
            assert ask(pool, prompt(name)) == PromptReady(request=name, text="go", episode=True)
        pool.submit(EnvStep(request="waits", turn=Turn(text="5")))
        pool.submit(score("bad", "die"))
        events = named(gather(pool, 2))
        assert isinstance(events["waits"], EpisodeLost)
        # Its reward was asked of the episode first, and so was no longer in the main thread.
        assert isinstance(events["bad"], EpisodeLost)
        assert ask(pool, prompt("waits")) == PromptReady(request="waits", text="go", episode=True)


def test_an_episode_may_await_in_every_method_and_steps_run_at_the_same_time(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with TaskPool(task(folder, episodes=True)) as pool:
        names = [f"r{number}" for number in range(20)]
        for name in names:
            pool.submit(prompt(name))
        gather(pool, 20)
        for name in names:
            pool.submit(EnvStep(request=name, turn=Turn(text="0.5")))
        assert all(isinstance(event, EnvObserved) for event in gather(pool, 20))
        for name in names:
            pool.submit(score(name, "quick"))
        assert all(isinstance(event, Rewarded) for event in gather(pool, 20))
        pool.submit(prompt("open"))
        gather(pool, 1)
        pool.submit(EnvStep(request="open", turn=Turn(text="60")))
        pool.poll(wait_s=0.2)
        pool.forget("open")  # closes when the step that is under way is cancelled
        ask(pool, prompt("last"))
        end, text = time.monotonic() + DEADLINE_S, ""
        while text.count("closed") < 21 and time.monotonic() < end:
            pool.poll(wait_s=0.05)
            text += capfd.readouterr().err
    assert text.count("closed") >= 21


@pytest.mark.parametrize("kind", ["flaky", "mixed flaky"])
def test_what_raises_retry_is_made_again_without_holding_up_others(folder: Path, kind: str) -> None:
    with TaskPool(task(folder)) as pool:
        pool.submit(score("flaky", f"{kind} a 2"))
        pool.submit(score("hopeless", f"{kind} b 99"))
        assert isinstance(ask_beside(pool, "quick", "pid"), Rewarded)
        events = named(gather(pool, 2))
        assert events["flaky"] == Rewarded(request="flaky", reward=3.0, raw=None, parts={})
        assert events["hopeless"] == TaskFailed(
            request="hopeless", error="Retry", message="try 4 of b"
        )
        assert pool.deaths == 0


def test_a_row_with_tools_is_an_episode_whose_calls_are_made_here(folder: Path) -> None:
    config = replace(task(folder, limit_s=5.0), kind="awaiting_task:Tools", options={})
    config = replace(config, environment_timeout_s=0.5)
    add, fetch, hang = (
        ToolCall(name="add", arguments={"a": 1, "b": 2}, id="x"),
        ToolCall(name="fetch", arguments={"name": "a"}, id="y"),
        ToolCall(name="hang", id="z"),
    )
    with TaskPool(config) as pool:
        assert not pool.wait().single_turn
        ready = ask(pool, prompt("a"))
        assert isinstance(ready, PromptReady)
        assert ready.messages == ({"role": "user", "content": "1 + 2?"},)
        assert [tool["function"]["name"] for tool in ready.tools] == ["add", "hang", "fetch"]
        assert (ready.text, ready.episode) == ("", True)
        observed = ask(
            pool, EnvStep(request="a", turn=Turn(text="", tool_calls=(add, fetch, hang)))
        )
        assert isinstance(observed, EnvObserved)
        assert not observed.ok
        assert [message["content"] for message in observed.messages] == [
            "3",
            "text of a",
            "error: timed out after 0.5 s",
        ]
        done = ask(pool, EnvStep(request="a", turn=Turn(text="3")))
        assert done == EnvObserved(request="a", text="", done=True, tool="", ok=True)
        completion = Completion(text="3", messages=[{"role": "assistant", "content": "3"}])
        scored = ask(pool, replace(score("a", ""), completion=completion))
        assert scored == Rewarded(request="a", reward=1.0, raw=None, parts={})
        assert pool.deaths == 0


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_every_call_gets_one_event_and_a_forgotten_one_none(folder: Path, seed: int) -> None:
    chance = random.Random(seed)
    texts = ["sleep 0.02"] * 8 + ["pid", "mixed pid", "raise", "exit", "later die", "die"]
    texts += ["sleep 60", "flaky {} 1", "mixed flaky {} 1"]
    remaining = [f"r{number}" for number in range(150)]
    begun: set[str] = set()
    counter: Counter[str] = Counter()
    with TaskPool(replace(task(folder, limit_s=1.0), processes=2)) as pool:
        end = time.monotonic() + DEADLINE_S
        while (remaining or pool.pending) and time.monotonic() < end:
            while remaining and pool.pending < 30:
                name = remaining.pop()
                pool.submit(score(name, chance.choice(texts).format(name)))
                begun.add(name)
            for event in pool.poll(wait_s=0.02):
                counter.update([event.request])
                if isinstance(event, Rewarded) and event.reward > 200:  # its process
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(event.reward), signal.SIGKILL)
            for name in sorted(begun - set(counter)):
                if chance.random() < 0.002:
                    pool.forget(name)
                    begun.discard(name)
        assert not remaining
        assert pool.poll(wait_s=0.05) == []
        assert isinstance(ask(pool, score("last", "sleep 0.01")), Rewarded)
    assert counter == Counter(begun)
