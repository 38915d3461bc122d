"""Tests of concurrent tool calls and their results."""

import asyncio
import re
import threading
from collections.abc import Iterator
from typing import Any, Literal

import pytest

from dora_pipe.producers.tasks import tools
from dora_pipe.producers.tasks.messages import normal
from dora_pipe.producers.tasks.task import Observation, Retry, Tool, ToolCall, Turn
from dora_pipe.producers.tasks.tools import CALLS_MAX, ToolResult, call_tools

released = threading.Event()
both = threading.Barrier(2)


@pytest.fixture(autouse=True)
def threads_end() -> Iterator[None]:
    released.clear()
    yield
    released.set()


def add(a: int, b: float = 1.0) -> float:
    return a + b


def words(way: Literal["up", "down"] = "up") -> dict[str, Any]:
    return {"way": way, "ünï": [1, None]}


async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return f"slept {seconds:g}"


def meet() -> str:
    both.wait(60)
    return "met"


def hang() -> None:
    released.wait()


async def hang_too() -> None:
    await asyncio.sleep(60)


def broken() -> int:
    return 1 // 0


async def leaves() -> None:
    raise asyncio.CancelledError


def odd() -> object:
    return object()


FUNCTIONS: list[Tool] = [add, words, nap, meet, hang, hang_too, broken, leaves, odd]


def called(*calls: ToolCall, limit_s: float = 5.0, **more: Any) -> Observation:
    async def run() -> Observation:
        tools.TOOL_LIMIT_S.set(limit_s)
        return await call_tools(FUNCTIONS, Turn(text="", tool_calls=calls), **more)

    return asyncio.run(run())


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, id=f"call of {name}")


@pytest.mark.parametrize(
    ("asked", "text", "ok"),
    [
        (call("add", a=1, b=2.5), "3.5", True),
        (call("add", a=1), "2.0", True),
        (call("words", way="down"), '{"way":"down","ünï":[1,null]}', True),
        (call("nap", seconds=0), "slept 0", True),
        (call("ad", a=1), "error: unknown tool `ad`: did you mean `add`?", False),
        (
            call("add", a="1"),
            "error: arguments of `add`: Expected `int`, got `str` - at `$.a`",
            False,
        ),
        (call("add"), "error: arguments of `add`: Object missing required field `a`", False),
        (call("add", a=1, c=1), "error: arguments of `add`: Object contains unknown field `c`", 0),
        (call("words", way="left"), "error: arguments of `words`: Invalid enum value 'left'", 0),
        (call("broken"), "error: ZeroDivisionError: integer division or modulo by zero", False),
        (call("leaves"), "error: cancelled", False),
        (
            call("odd"),
            "error: `odd` gave a value that cannot be shown: builtins.object cannot",
            False,
        ),
        (ToolCall(name="", error="no JSON", raw="{"), "error: no JSON", False),
    ],
)
def test_the_model_is_told_what_came_of_a_call(asked: ToolCall, text: str, ok: bool) -> None:
    observed = called(asked)
    (message,) = normal(observed.messages)
    assert message["content"].startswith(text)
    assert message["role"] == "tool"
    assert message["tool_call_id"] == asked.id
    assert message.get("name", "") == asked.name
    assert (observed.ok, observed.done) == (bool(ok), False)
    raised = r"ZeroDivisionError: test_tools\.py:\d+: integer division or modulo by zero"
    own = {"broken": raised, "leaves": None}.get(asked.name, "")
    assert own is None or re.fullmatch(own, observed.error)


def test_the_calls_of_a_turn_run_at_the_same_time_and_are_answered_in_their_order() -> None:
    observed = called(
        call("meet"), call("nap", seconds=0), call("broken"), call("meet"), limit_s=60
    )
    assert [message["content"] for message in observed.messages] == [
        "met",
        "slept 0",
        "error: ZeroDivisionError: integer division or modulo by zero",
        "met",
    ]
    assert observed.tool == "meet,nap,broken"


def test_calls_that_hang_are_given_up() -> None:
    observed = called(call("hang"), call("hang_too"), limit_s=0.2)
    assert [message["content"] for message in observed.messages] == [
        "error: timed out after 0.2 s"
    ] * 2


def test_what_asks_to_be_tried_again_does_so_alone() -> None:
    created: list[str] = []

    def once(name: str) -> str:
        created.append(name)
        if name == "b" and created.count("b") < 2:
            raise Retry("the search is full")
        return name

    results: dict[int, ToolResult] = {}
    turn = Turn(
        text="", tool_calls=tuple(ToolCall(name="once", arguments={"name": n}) for n in "abc")
    )
    with pytest.raises(Retry, match="the search is full"):
        asyncio.run(call_tools([once], turn, results))
    observed = asyncio.run(call_tools([once], turn, results))
    assert [message["content"] for message in observed.messages] == ["a", "b", "c"]
    assert sorted(created) == ["a", "b", "b", "c"]


def test_a_turn_with_too_many_calls_is_told_so() -> None:
    observed = called(*[call("add", a=n) for n in range(CALLS_MAX + 2)])
    texts = [message["content"] for message in observed.messages]
    assert texts[:CALLS_MAX] == [str(n + 1.0) for n in range(CALLS_MAX)]
    assert all("only 32 calls" in text for text in texts[CALLS_MAX:])
