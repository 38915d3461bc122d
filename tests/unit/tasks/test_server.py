"""Tests of the task server without a process."""

import asyncio
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy
import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks import server
from dora_pipe.producers.tasks.calls import (
    UP,
    Call,
    CallAnswer,
    Down,
    EndEpisode,
    EnvObserved,
    EnvStep,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    Setup,
    TaskCall,
    TaskEvent,
    TaskFailed,
    unpack,
)
from dora_pipe.producers.tasks.task import (
    Completion,
    Environment,
    Observation,
    Reward,
    Row,
    Split,
    Task,
    Turn,
)


class World(Environment):
    closed = 0

    def reset(self, row: Row) -> str:
        return str(row["prompt"])

    def step(self, text: str) -> Observation:
        if text == "raise":
            raise RuntimeError("no")
        return Observation(text=text, done=False)

    def close(self) -> None:
        World.closed += 1
        raise OSError("cannot close")


class Scripted(Task):
    def __init__(self, *, reward: Any = 1.0, prompt: Any = "p", world: bool = False) -> None:
        self._reward, self._prompt, self._world = reward, prompt, world

    def rows(self, split: Split) -> Sequence[Row]:
        return [{"prompt": self._prompt}] if split == "train" else []

    def prompt(self, row: Row) -> str:
        return row["prompt"]  # type: ignore[no-any-return]

    def environment(self, row: Row) -> Environment | None:
        return World() if self._world else None

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> Any:
        return self._reward


class Served:
    def __init__(self, task: Task, **config: Any) -> None:
        self.written = bytearray()
        setup = Setup(model.Task(kind="tests:", threads=1, **config), 1)
        self.server = server.TaskServer(task, setup, self.written.extend)

    def answer(self, *frames: Down) -> TaskEvent:
        asyncio.run(self._take(frames))
        answers = [UP.decode(body) for body in unpack(self.written)]
        return [frame.event for frame in answers if isinstance(frame, CallAnswer)][-1]

    async def _take(self, frames: Sequence[Down]) -> None:
        for frame in frames:
            self.server.take(frame)
            while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(tasks)


def answer(task: Task, *calls: Call) -> TaskEvent:
    return Served(task).answer(*calls)


COMPLETION = Completion(text="t", turns=("t",))
SCORE = Call(7, None, RewardCall(request="a", split="train", index=0, completion=COMPLETION))
PROMPT = Call(1, None, PromptCall(request="a", split="train", index=0))


def rewarded(number: float) -> Rewarded:
    return Rewarded(request="a", reward=number, raw=None, parts={})


def of_episode(number: int, call: TaskCall) -> Call:
    return Call(number, 1, call)


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (numpy.float32(0.5), 0.5),
        (numpy.array(2.0), 2.0),
        (Fraction(1, 4), 0.25),
    ],
)
def test_any_finite_number_is_a_reward(value: Any, number: float) -> None:
    assert answer(Scripted(reward=value), SCORE) == rewarded(number)


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        None,
        "1.0",
        b"1",
        [1.0],
        1j,
        10**400,
        Reward(value=math.nan),
        Reward(value=1.0, raw=math.inf),
        Reward(value=1.0, parts={"a": "b"}),  # type: ignore[dict-item]
        Reward(value=1.0, answer=42),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_finite_number_is_an_error(value: Any) -> None:
    failed = answer(Scripted(reward=value), SCORE)
    assert isinstance(failed, TaskFailed)
    assert failed.request == "a"
    assert failed.error in ("NoAnswer", "OverflowError")
    assert failed.message


@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ("", ""),
        (" 4\n 2 ", "4 2"),
        ("a\x1bb", "a\\x1bb"),
        ("\ud800", "\\ud800"),
        ("x" * 200, "x" * 200),
    ],
)
def test_answer_is_one_line_that_can_be_printed(text: str, logged: str) -> None:
    actual_answer = answer(Scripted(reward=Reward(value=1.0, answer=text)), SCORE)
    assert isinstance(actual_answer, Rewarded) and actual_answer.answer == logged


@pytest.mark.parametrize("value", [1.000001e6, -1e200, Reward(value=1.7e308)])
def test_a_reward_beyond_the_bound_is_an_error_that_names_the_bound(value: Any) -> None:
    failed = answer(Scripted(reward=value), SCORE)
    assert isinstance(failed, TaskFailed)
    assert "beyond 1e+06" in failed.message


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        (None, "the prompt is NoneType, neither text nor messages"),
        (3, "the prompt is int, neither text nor messages"),
        ([], "prompt is empty"),
        (["p"], "prompt[0] is str, not a message"),
    ],
)
def test_prompt_that_is_neither_text_nor_messages_is_an_error(prompt: Any, why: str) -> None:
    failed = answer(Scripted(prompt=prompt), PROMPT)
    assert isinstance(failed, TaskFailed)
    assert failed.message == why


def test_environment_that_raises_keeps_its_episode_and_closing_errors_are_shown_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    World.closed = 0
    served = Served(Scripted(world=True))
    failed = served.answer(PROMPT, of_episode(2, EnvStep(request="a", turn=Turn(text="raise"))))
    assert isinstance(failed, TaskFailed)
    assert failed.error == "RuntimeError"
    step = of_episode(3, EnvStep(request="a", turn=Turn(text="go")))
    observed = served.answer(step, EndEpisode(1), EndEpisode(1))
    assert isinstance(observed, EnvObserved)
    assert World.closed == 1
    assert "cannot close" in capsys.readouterr().err


def test_tracebacks_are_shown_boundedly(capsys: pytest.CaptureFixture[str]) -> None:
    served = Served(Scripted(reward=None))
    served.answer(*[SCORE] * (2 * server.ERRORS_MAX))
    err = capsys.readouterr().err
    assert err.count("Traceback") == server.ERRORS_MAX
    assert err.count("not shown") == 1


def test_an_error_of_this_program_is_a_line_and_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Lacking(Scripted):
        def score(self, row: Any, completion: Any) -> Any:
            raise TaskError("the row has no column `answer` for its answer")

    failed = answer(Lacking(), SCORE)
    assert isinstance(failed, TaskFailed)
    assert capsys.readouterr().err == (
        "task: row 0 of train: the row has no column `answer` for its answer\n"
    )


@pytest.mark.parametrize(("own", "config", "text"), [(0, 0, 0), (1, 0, 1), (0, 1, 1)])
def test_prompt_of_an_episode_says_whether_it_can_be_told_again(
    own: bool, config: bool, text: bool
) -> None:
    task = Scripted(world=True)
    task.replayable = bool(own)
    served = Served(task, replayable=bool(config))
    ready = served.answer(PROMPT)
    assert isinstance(ready, PromptReady)
    assert (ready.episode, ready.replayable) == (True, text)
    assert served.server.facts().replayable == text
    assert not Scripted().replayable
