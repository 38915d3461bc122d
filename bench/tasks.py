"""Measures which share of an engine's slots is busy while environments take their time, and what a
step costs the task process; decides nothing.

The task pool and its one process are real, and so is the time; the engine is a model of one: a turn
holds a slot for a while and costs nothing. Latencies are normal, as in ROLL Flash (arXiv
2510.11345), and none is below 0.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Literal

from dora_pipe.config import model
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    PromptCall,
    PromptReady,
    RewardCall,
    TaskEvent,
)
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.tasks.port import Environment, Observation, Row, Split, Task, Turn

SLOTS: Final = 64
TURNS: Final = 8
WARM_S: Final = 3.0
"""What is before does not count."""
SECONDS: Final = 10.0
LATE_S: Final = 60.0

Code = Literal["async", "plain", "plain, threads = 1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCase:
    """What episodes wait for. Example: ``TaskCase(code="async", mean_ms=100, deviation_ms=100)``"""

    code: Code
    mean_ms: float
    """Of an environment's latency, with its standard deviation."""
    deviation_ms: float
    sampling_ms: float = 100.0
    """Of a turn in a slot: from half of it to one and a half."""
    episodes: int = 4 * SLOTS
    """Open at a time."""


CASES: Final = (
    *(
        TaskCase(code=code, mean_ms=100.0, deviation_ms=100.0)
        for code in ("async", "plain", "plain, threads = 1")
    ),
    TaskCase(code="async", mean_ms=1000.0, deviation_ms=0.0, sampling_ms=500.0),
    *(
        TaskCase(code=code, mean_ms=0.0, deviation_ms=0.0)
        for code in ("async", "plain", "plain, threads = 1")
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFigure:
    """One process, `SLOTS` slots."""

    code: str
    mean_ms: float
    deviation_ms: float
    sampling_ms: float
    episodes: int
    busy: float
    """Share of the slots."""
    steps_per_s: float
    us_per_step: float
    """CPU time of the task process, prompts and rewards included."""


class Latency(Environment):
    """Answers after a while, with the CPU time of its process."""

    def __init__(self, mean_s: float, deviation_s: float) -> None:
        self._mean_s, self._deviation_s = mean_s, deviation_s

    def reset(self, row: Row) -> str:
        """See Environment."""
        self._chance = Random(row["n"])
        return "go"

    def step(self, text: str) -> Observation:
        """See Environment."""
        if latency_s := self._latency_s():
            time.sleep(latency_s)
        return Observation(text=str(time.process_time()), done=False)

    def _latency_s(self) -> float:
        return max(0.0, self._chance.gauss(self._mean_s, self._deviation_s))


class AwaitedLatency(Latency):
    """The same, `async`."""

    async def step(self, text: str) -> Observation:  # type: ignore[override]
        """See Environment."""
        if latency_s := self._latency_s():
            await asyncio.sleep(latency_s)
        return Observation(text=str(time.process_time()), done=False)


class LatencyTask(Task):
    """Episodes with latencies of their own, the same in every run."""

    def __init__(self, *, kind: str, mean_s: float, deviation_s: float) -> None:
        """`kind`: `async`, or anything else."""
        self._kind = AwaitedLatency if kind == "async" else Latency
        self._latency = mean_s, deviation_s

    def rows(self, split: Split) -> Sequence[Row]:
        """See Task."""
        return [{"n": n} for n in range(4096)]

    def environment(self, row: Row) -> Environment:
        """See Task."""
        return self._kind(*self._latency)

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """See Task."""
        return 0.0


def bench_tasks(
    cases: Sequence[TaskCase] = CASES, *, warm_s: float = WARM_S, seconds: float = SECONDS
) -> list[TaskFigure]:
    """A figure per case."""
    return [_measure(case, warm_s, seconds) for case in cases]


def _measure(case: TaskCase, warm_s: float, seconds: float) -> TaskFigure:
    keys: dict[str, Any] = {"threads": 1} if case.code.endswith("1") else {}
    latency = {"mean_s": case.mean_ms / 1e3, "deviation_s": case.deviation_ms / 1e3}
    task = model.Task(
        kind="dora_pipe.bench.tasks:LatencyTask",
        options={"kind": case.code, **latency},
        environment_timeout_s=LATE_S,
        **keys,
    )
    with TaskPool(task) as pool:
        pool.wait()
        drive = _Drive(case, pool)
        drive.until(drive.begin_s + warm_s)
        busy_s, steps, cpu_s = drive.busy_s, drive.steps, drive.cpu_s
        drive.until(drive.begin_s + warm_s + seconds)
    made = drive.steps - steps
    return TaskFigure(
        code=case.code,
        mean_ms=case.mean_ms,
        deviation_ms=case.deviation_ms,
        sampling_ms=case.sampling_ms,
        episodes=case.episodes,
        busy=(drive.busy_s - busy_s) / seconds / SLOTS,
        steps_per_s=made / seconds,
        us_per_step=1e6 * (drive.cpu_s - cpu_s) / max(1, made),
    )


@dataclass(slots=True)
class _Drive:
    """Slots, those who wait for one, and those who wait for the task."""

    case: TaskCase
    pool: TaskPool
    begin_s: float = field(default_factory=time.monotonic)
    busy_s: float = 0.0
    """Of all slots together."""
    steps: int = 0
    cpu_s: float = 0.0
    _now_s: float = field(default_factory=time.monotonic)
    _begun: int = 0
    _waiting: deque[str] = field(default_factory=deque)
    _sampling: list[tuple[float, str]] = field(default_factory=list)
    """(end, request), a heap."""
    _turns: dict[str, int] = field(default_factory=dict)
    _chance: Random = field(default_factory=lambda: Random(1))

    def until(self, end_s: float) -> None:
        """Go on until then."""
        while self._now_s < end_s:
            self._open()
            self._fill()
            until_s = min([end_s, *(one[0] for one in self._sampling[:1])])
            wait_s = 0.0 if self.pool.busy else max(0.0, until_s - time.monotonic())
            events = self.pool.poll(wait_s)
            self._pass(min(time.monotonic(), end_s))
            for event in events:
                self._heard(event)

    def _open(self) -> None:
        while len(self._turns) < self.case.episodes:
            name = f"r{self._begun}"
            self._turns[name] = 0
            self.pool.submit(PromptCall(request=name, split="train", index=self._begun % 4096))
            self._begun += 1

    def _fill(self) -> None:
        while self._waiting and len(self._sampling) < SLOTS:
            share = self._chance.uniform(0.5, 1.5)
            end_s = self._now_s + share * self.case.sampling_ms / 1e3
            heapq.heappush(self._sampling, (end_s, self._waiting.popleft()))

    def _pass(self, now_s: float) -> None:
        """Time has passed: turns end, each at its time."""
        while self._sampling and self._sampling[0][0] <= now_s:
            end_s, name = heapq.heappop(self._sampling)
            self.busy_s += (len(self._sampling) + 1) * max(0.0, end_s - self._now_s)
            self._now_s = max(self._now_s, end_s)
            self._said(name)
        self.busy_s += len(self._sampling) * (now_s - self._now_s)
        self._now_s = now_s

    def _said(self, name: str) -> None:
        self._turns[name] += 1
        if self._turns[name] <= TURNS:
            self.pool.submit(EnvStep(request=name, turn=Turn(text="go")))
        else:
            del self._turns[name]
            call = RewardCall(request=name, split="train", index=0, text="", turns=())
            self.pool.submit(call)

    def _heard(self, event: TaskEvent) -> None:
        if isinstance(event, PromptReady | EnvObserved):
            self._waiting.append(event.request)
        if isinstance(event, EnvObserved):
            self.steps += 1
            self.cpu_s = max(self.cpu_s, float(event.text))
