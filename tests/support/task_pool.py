"""Faulty user module and polling for tests of the task pool."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import PromptCall, RewardCall, Rewarded, TaskEvent, TaskFacts
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.task import Completion

LIMIT_S = 1.0
"""Limit for calls meant to hang; others get more on a busy machine."""

PATIENCE_S = 60.0
DEADLINE_S = 60.0

USER_MODULE = """
import ctypes, os, subprocess, sys, time
from dora_pipe.producers.tasks.task import Environment, Observation, Reward, Task

REWARDS = {
    "one": lambda: 1, "true": lambda: True, "nan": lambda: float("nan"),
    "rich": lambda: Reward(value=0.5, raw=1.0, parts={"exact": 1.0}),
    "exit": lambda: sys.exit(3), "die": lambda: os._exit(7),
    "crash": lambda: os.kill(os.getpid(), 11), "pid": os.getpid,
    "print control":
        lambda: print("red\\x1b[31m", "\\x9b2J", file=sys.stderr) or print("\\x07") or 1,
}

def forever():
    while True:
        pass

def orphan():
    subprocess.Popen(["sleep", f"1000.{os.getpid()}"])
    forever()

class Counting(Environment):
    def reset(self, row):
        self.turns = 0
        return f"episode of {row['n']}"
    def step(self, text):
        self.turns += 1
        if text == "die": os._exit(9)
        if text == "hang": forever()
        if text == "sleep": time.sleep(0.5)
        if text == "sleep for ever": time.sleep(1000)
        self.closing_s = 0.3 if text == "be slow to close" else 0
        if text == "raise": raise RuntimeError("no such\\nmove")
        if text == "nonsense": return "not an observation"
        return Observation(text=f"{text} {self.turns}", done=text == "stop", tool="echo")
    def reward(self, text, turns):
        return self.turns + 0.5 if text == "ask the episode" else None
    def close(self):
        time.sleep(getattr(self, "closing_s", 0))
        print(f"closed after {self.turns}", file=sys.stderr, flush=True)

class Odd(Task):
    def __init__(self, rows=8, episodes=False):
        self.count, self.episodes = rows, episodes
    def rows(self, split):
        return [{"n": n} for n in range(self.count if split == "train" else 2)]
    def prompt(self, row):
        return f"row {row['n']}"
    def environment(self, row):
        return Counting() if self.episodes else None
    def reward(self, row, text, turns):
        if text == "forever": forever()
        if text == "orphan": orphan()
        if text == "slow": time.sleep(0.05)
        if text == "raise": raise ValueError("x" * 1000 + "\\nline")
        row["n"] += 100  # must not stay
        return REWARDS[text]() if text in REWARDS else float(row["n"])
"""


def write_module(folder: Path) -> Path:
    (folder / "odd_task.py").write_text(USER_MODULE)
    return folder


def task(
    folder: Path, *, processes: int = 1, limit_s: float = PATIENCE_S, **options: Any
) -> model.Task:
    return model.Task(
        kind="odd_task:Odd",
        directory=str(folder),
        options=options,
        processes=processes,
        reward_timeout_s=limit_s,
        environment_timeout_s=limit_s,
    )


def survey(task: model.Task) -> TaskFacts:
    with TaskPool(msgspec.structs.replace(task, processes=1)) as pool:
        return pool.wait()


def score(request: str, text: str, index: int = 0) -> RewardCall:
    completion = Completion(text=text, turns=(text,))
    return RewardCall(request=request, split="train", index=index, completion=completion)


def prompt(request: str, index: int = 0) -> PromptCall:
    return PromptCall(request=request, split="train", index=index)


def gather(pool: TaskPool, count: int) -> list[TaskEvent]:
    events: list[TaskEvent] = []
    end = time.monotonic() + DEADLINE_S
    while len(events) < count:
        assert time.monotonic() < end, f"only {events}"
        events += pool.poll(wait_s=0.1)
    return events


def ask(pool: TaskPool, call: Any) -> TaskEvent:
    pool.submit(call)
    (event,) = gather(pool, 1)
    return event


def pid_of(pool: TaskPool) -> int:
    event = ask(pool, score("pid", "pid"))
    assert isinstance(event, Rewarded)
    return int(event.reward)


def is_gone(pid: int) -> bool:
    """Report whether a process ended with all threads; zombies count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    except FileNotFoundError:
        return True
    return state == "Z" and threads <= 1


def poll_until(pool: TaskPool, done: Callable[[], bool]) -> bool:
    end = time.monotonic() + DEADLINE_S
    while not done() and time.monotonic() < end:
        assert pool.poll(wait_s=0.05) == []
    return done()


def wait_until_gone(pid: int) -> bool:
    end = time.monotonic() + DEADLINE_S
    while not is_gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return is_gone(pid)
