"""What counts as an answer, in the server without its process."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy
import pytest

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks import server
from dora_pipe.producers.tasks.calls import (
    UP,
    Call,
    CallAnswer,
    EnvStep,
    PromptCall,
    RewardCall,
    Rewarded,
    TaskCall,
    TaskEvent,
    TaskFailed,
    unpack,
)
from dora_pipe.producers.tasks.port import (
    Environment,
    Observation,
    Reward,
    Row,
    Split,
    Task,
    Turn,
)
from dora_pipe.schemas.wire import REWARD_MAX


class World(Environment):
    """Answers with what it is told to."""

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
    """Rows, prompt and reward as given."""

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


def answer(task: Task, *calls: Call) -> TaskEvent:
    """What the last of these calls gives."""
    served = server.TaskServer(task)
    packed = [served.answer(call) for call in calls][-1]
    (body,) = unpack(bytearray(packed))
    decoded = UP.decode(body)
    assert isinstance(decoded, CallAnswer)
    assert decoded.number == calls[-1].number
    return decoded.event


SCORE = Call(7, None, RewardCall(request="a", split="train", index=0, text="t", turns=("t",)))
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
    ],
)
def test_what_is_no_finite_number_is_an_error(value: Any) -> None:
    failed = answer(Scripted(reward=value), SCORE)
    assert isinstance(failed, TaskFailed)
    assert failed.request == "a"
    assert failed.error in ("NoAnswer", "OverflowError")
    assert failed.message


@pytest.mark.parametrize("value", [REWARD_MAX, -REWARD_MAX, 1.0])
def test_a_reward_within_the_bound_is_taken(value: float) -> None:
    assert answer(Scripted(reward=value), SCORE) == rewarded(value)


@pytest.mark.parametrize("value", [1.000001e6, -1e200, Reward(value=1.7e308)])
def test_a_reward_beyond_the_bound_is_an_error_that_names_the_bound(value: Any) -> None:
    failed = answer(Scripted(reward=value), SCORE)
    assert isinstance(failed, TaskFailed)
    assert "beyond 1e+06" in failed.message


@pytest.mark.parametrize("prompt", [None, 3, ["p"]])
def test_prompt_that_is_no_text_is_an_error(prompt: Any) -> None:
    failed = answer(Scripted(prompt=prompt), PROMPT)
    assert isinstance(failed, TaskFailed)
    assert "not text" in failed.message


def test_environment_that_raises_keeps_its_episode_and_closing_errors_are_shown_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    World.closed = 0
    served = server.TaskServer(Scripted(world=True))
    served.answer(PROMPT)
    assert b"RuntimeError" in served.answer(
        of_episode(2, EnvStep(request="a", turn=Turn(text="raise")))
    )
    assert b"Observed" in served.answer(of_episode(3, EnvStep(request="a", turn=Turn(text="go"))))
    served.end(1)
    served.end(1)
    assert World.closed == 1
    assert "cannot close" in capsys.readouterr().err


def test_score_closes_the_episode_even_when_the_reward_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    World.closed = 0
    score = RewardCall(request="a", split="train", index=0, text="t", turns=())
    scored = answer(Scripted(world=True, reward=None), PROMPT, of_episode(2, score))
    assert isinstance(scored, TaskFailed)
    assert World.closed == 1
    assert "Traceback" in capsys.readouterr().err


def test_tracebacks_are_shown_boundedly(capsys: pytest.CaptureFixture[str]) -> None:
    served = server.TaskServer(Scripted(reward=None))
    for _ in range(2 * server.TRACEBACKS_MAX):
        served.answer(SCORE)
    said = capsys.readouterr().err
    assert said.count("Traceback") == server.TRACEBACKS_MAX
    assert said.count("not shown") == 1


def test_task_without_training_rows_is_refused() -> None:
    class Empty(Scripted):
        def rows(self, split: Split) -> Sequence[Row]:
            return []

    with pytest.raises(TaskError, match="no rows"):
        server.TaskServer(Empty())
