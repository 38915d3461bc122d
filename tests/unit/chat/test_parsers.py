"""Tests of parsers of turns, including invalid calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.chat.parsers import PARSERS, none
from dora_pipe.producers.chat.template_features import PROBE_TOOL

ADD = {"name": "add", "arguments": {"a": 1, "b": "x y"}}

WELL_MADE: list[tuple[str, str, str, list[dict[str, Any]]]] = [
    (
        "hermes",
        'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x y"}}\n</tool_call>',
        "Well.",
        [ADD],
    ),
    (
        "xml",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=b>\nx y\n</parameter>\n</function>\n</tool_call>",
        "",
        [ADD],
    ),
    (
        "glm",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>x y</arg_value>\n</tool_call>",
        "",
        [ADD],
    ),
    ("llama", '{"name": "add", "parameters": {"a": 1, "b": "x y"}}', "", [ADD]),
    (
        "llama",
        '{"name": "add", "parameters": {"a": NaN, "b": "\\ud83d"}}',
        "",
        [{"name": "add", "arguments": {"a": "NaN", "b": "\\ud83d"}}],
    ),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": -1e999}}</tool_call>',
        "",
        [{"name": "add", "arguments": {"a": "-1e999"}}],
    ),
    (
        "pythonic",
        "<|tool_call_start|>[add(a=1e999, b='\\ud83d', c=(None, True))]<|tool_call_end|>",
        "",
        [{"name": "add", "arguments": {"a": "Infinity", "b": "\\ud83d", "c": [None, True]}}],
    ),
    (
        "pythonic",
        "<|tool_call_start|>[add(a=1, b='x y'), add(a=1, b='x y')]<|tool_call_end|>",
        "",
        [ADD, ADD],
    ),
    ("llama", "It is {3}.", "It is {3}.", []),
    ("hermes", "It is 3.", "It is 3.", []),
]

BADLY_MADE = [
    ("hermes", "<tool_call>\n{oops}\n</tool_call>", "no JSON"),
    ("hermes", '<tool_call>\n{"name": "add"', "no </tool_call>"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "without a name"),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not an object"),
    ("xml", "<tool_call>{}</tool_call>", "no <function=...>"),
    ("glm", "<tool_call>{}</tool_call>", "without a name"),
    ("llama", '{"name": "add", ', "no JSON"),
    ("pythonic", "<|tool_call_start|>[add(1)]<|tool_call_end|>", "named arguments"),
    ("pythonic", "<|tool_call_start|>[add(**{'a': 1})]<|tool_call_end|>", "named arguments"),
    ("pythonic", "<|tool_call_start|>[add(a={1, 2})]<|tool_call_end|>", "not JSON serializable"),
]


@pytest.mark.parametrize(("name", "text", "message", "calls"), WELL_MADE)
def test_calls_are_read(name: str, text: str, message: str, calls: list[dict[str, Any]]) -> None:
    turn = PARSERS[name](text, ())
    assert (turn.text, turn.reasoning) == (message, "")
    assert [{"name": call.name, "arguments": call.arguments} for call in turn.tool_calls] == calls


@pytest.mark.parametrize(("name", "text", "why"), BADLY_MADE)
def test_what_is_no_call_says_why_and_how_it_was_written(name: str, text: str, why: str) -> None:
    (call,) = PARSERS[name](text, ()).tool_calls
    assert why in call.error
    assert call.raw and call.raw in text


def test_values_that_are_written_as_text_are_what_the_schema_says() -> None:
    text = "<tool_call><function=zamble><parameter=wug>42</parameter></function></tool_call>"
    for tools, value in (((), 42), ([PROBE_TOOL], "42")):
        (call,) = PARSERS["xml"](text, tools).tool_calls
        assert call.arguments == {"wug": value}


@pytest.mark.parametrize(
    ("text", "reasoning", "message"),
    [
        ("<think>\nhm\n</think>\n\n3", "hm", "3"),
        ("hm</think>3", "hm", "3"),
        ("<think>hm", "hm", ""),
        ("3", "", "3"),
    ],
)
def test_thoughts_are_no_text(text: str, reasoning: str, message: str) -> None:
    assert (none(text, ()).reasoning, none(text, ()).text) == (reasoning, message)


@pytest.mark.parametrize("name", PARSERS)
@given(
    text=st.lists(
        st.one_of(
            st.text(max_size=5),
            st.sampled_from(
                ["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", "[", "f(a=1)", "<think>",
                 "<function=f>", "<arg_key>", "<|tool_call_start|>", "</think>", "(" * 90]
            ),
        ),
        max_size=8,
    ).map("".join)
)  # fmt: skip
def test_whatever_is_written_is_read(name: str, text: str) -> None:
    assert PARSERS[name](text, ()).message()["role"] == "assistant"
