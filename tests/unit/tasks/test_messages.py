"""Tests of messages and of tool schemas from functions."""

import dataclasses
import enum
import functools
import json
from collections.abc import Callable
from typing import Any, Literal, Optional

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks.messages import (
    NoAnswer,
    arguments_of,
    described,
    normal,
    text_of,
    tool_schema,
)

ADD = {"name": "add", "arguments": {"a": 1}}
USER = {"role": "user", "content": "hello"}


def called(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        (USER, USER),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]},
            {"role": "user", "content": "ab"},
        ),
        (
            {"role": "assistant", "content": None, "tool_calls": [{"function": ADD}]},
            called({"type": "function", "function": ADD}),
        ),
        (
            called({"id": "x", "function": {"name": "add", "arguments": '{"a": 1}'}}),
            called({"id": "x", "type": "function", "function": ADD}),
        ),
        (called(ADD), called({"type": "function", "function": ADD})),
        (
            called({"function": {"name": "now", "arguments": ""}}),
            called({"type": "function", "function": {"name": "now", "arguments": {}}}),
        ),
        (
            {"role": "assistant", "reasoning_content": "so", "name": None, "tool_calls": []},
            {"role": "assistant", "reasoning_content": "so", "content": ""},
        ),
        ({**USER, "weight": 0}, {**USER, "weight": 0}),
    ],
)
def test_messages_are_brought_into_one_form(message: Any, plain: dict[str, Any]) -> None:
    assert normal([message]) == (plain,)
    assert normal((plain,)) == (plain,)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ("hello", "messages is str, not a list of messages"),
        ({"role": "user"}, "messages is dict, not a list of messages"),
        ([], "messages is empty"),
        ([USER, "hello"], "messages[1] is str, not a message"),
        ([{"from": "human", "value": "hi"}], "messages[0].role is None (one of system,"),
        ([{"role": "users", "content": ""}], "'users' (did you mean `user`?)"),
        ([{"role": "user"}], "messages[0].content is missing"),
        ([{"role": "user", "content": {"a": 1}}], "messages[0].content is dict, neither"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            "messages[0].content[0] is a part of type `image_url`",
        ),
        ([{**USER, "tool_calls": [ADD]}], "messages[0].tool_calls: only an assistant"),
        ([called(ADD) | {"reasoning_content": 1}], "messages[0].reasoning_content is not text"),
        ([USER, called(ADD, {"arguments": {}})], "messages[1].tool_calls[1].function.name"),
        ([called({"name": "add", "arguments": "{"})], "tool_calls[0].function.arguments: "),
        ([called({"name": "add", "arguments": "[1]"})], "arguments is list, not an object"),
        ([{"role": "assistant", "tool_calls": "add"}], "tool_calls is str, not a list"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(messages: Any, why: str) -> None:
    with pytest.raises(NoAnswer) as refused:
        normal(messages)
    assert why in str(refused.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=2)
)
CALLS = st.builds(
    lambda name, arguments, text: {
        "function": {
            "name": name,
            "arguments": msgspec.json.encode(arguments).decode() if text else arguments,
        }
    },
    st.text(min_size=1),
    st.dictionaries(st.text(), JSON, max_size=2),
    st.booleans(),
)
MESSAGES = st.builds(
    lambda role, content, calls: {
        "role": role,
        "content": content,
        **({"tool_calls": calls} if role == "assistant" else {}),
    },
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.text() | st.lists(st.builds(lambda text: {"type": "text", "text": text}, st.text())),
    st.lists(CALLS, max_size=2) | st.none(),
)


@given(st.lists(MESSAGES, min_size=1, max_size=4))
def test_the_normal_form_of_a_normal_form_is_itself_and_plain_json(messages: Any) -> None:
    once = normal(messages)
    assert normal(once) == once
    assert msgspec.json.decode(msgspec.json.encode(once), type=tuple[dict[str, Any], ...]) == once


class Unit(enum.Enum):
    METRE = "m"
    FOOT = "ft"


@dataclasses.dataclass
class Place:
    x: int
    unit: Unit = Unit.METRE


@dataclasses.dataclass
class Nested:
    inside: "Nested"


def plain(a: int, b: float = 1.0) -> float:
    """Add two numbers.

    Args:
        a: The first
            of them.
        b: The other: any.

    Returns:
        Their sum.
    """
    return a + b


def rich(
    words: list[str],
    title: str,
    *,
    way: Literal["down", "up"] = "up",
    table: dict[str, int] | None = None,
    on: bool = False,
    limit: Optional[int] = None,  # noqa: UP045
) -> str:
    """Sort.

    Args:
        words: What.
        title: Over it.
        way: Where to.
        table: Of weights.
        on: Whether.
        limit: How many.
    """
    return ""


@pytest.mark.parametrize("function", [plain, rich])
def test_the_schema_is_the_one_that_transformers_makes(function: Callable[..., Any]) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs = utils.get_json_schema(function)
    theirs["function"].pop("return", None)
    assert tool_schema(function) == theirs


def placed(point: Place, unit: Unit) -> str:
    return f"{point} {unit}"


def test_classes_and_enumerations_are_written_out_where_they_are_used() -> None:
    unit = {"type": "string", "enum": ["ft", "m"]}
    function = tool_schema(placed)["function"]
    assert function["description"] == ""
    assert function["parameters"]["properties"]["unit"] == unit
    assert function["parameters"]["properties"]["point"]["properties"]["x"] == {"type": "integer"}
    converted: Any = msgspec.convert(
        {"point": {"x": 1, "unit": "ft"}, "unit": "m"}, arguments_of(placed)
    )
    assert (
        placed(converted.point, converted.unit) == "Place(x=1, unit=<Unit.FOOT: 'ft'>) Unit.METRE"
    )


GOOGLES = """Add.

Slowly.

Args:
    a (int): The first
        of them.
    b (float, optional): The other.

Raises:
    c: no
"""


def test_google_docstrings_describe_parameters() -> None:
    texts = {"a": "The first of them.", "b": "The other."}
    assert described(GOOGLES.strip()) == ("Add.\n\nSlowly.", texts)


def spread(*numbers: int) -> int:
    return 0


def odd(a: Callable[[], int]) -> int:
    return 0


def endless(a: Nested) -> int:
    return 0


def unknown(a: "Missing") -> int:  # type: ignore[name-defined]  # noqa: F821
    return 0


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (json.dumps, "parameter `obj` of tool `dumps` has no annotation"),
        (spread, "parameter `numbers` of tool `spread` cannot be passed by name"),
        (odd, "parameter `a` of tool `odd`: "),
        (endless, "`Nested` is recursive"),
        (unknown, "tool `unknown`: name 'Missing' is not defined"),
        (functools.partial(plain, 1), "a tool is a function with a name, not partial"),
        (lambda a: a, "a tool is a function with a name, not function"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_by_name(function: Any, why: str) -> None:
    with pytest.raises(NoAnswer) as refused:
        tool_schema(function)
    assert why in str(refused.value)


def test_text_of_a_content_joins_its_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert (text_of(parts), text_of("2"), text_of(None)) == ("ab", "2", "")
    with pytest.raises(TaskError, match="neither text nor text parts"):
        text_of([*parts, {"type": "image", "image": "x.png"}])
