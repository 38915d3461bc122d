"""Tests of conversations in data sets."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.data.conversations import (
    conversation_of,
    prompt_of,
    split_answer,
    unshown_columns,
)

USER = {"role": "user", "content": "1+1?"}
SAID = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    "value",
    [
        [USER, SAID],
        json.dumps([USER, SAID]),
        [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}],
        [{**USER, "tool_calls": None, "name": None}, {**SAID, "tool_calls": None}],
    ],
    ids=["messages", "JSON", "ShareGPT", "of a table"],
)
def test_every_form_of_a_conversation_is_messages(value: object) -> None:
    assert conversation_of(value, in_text=True) == [USER, SAID]


def test_keys_that_hold_nothing_are_dropped_but_not_in_arguments() -> None:
    call = {"id": "a", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0}
    assert conversation_of([USER, message]) == [
        USER,
        {"role": "assistant", "tool_calls": [call], "weight": 0, "content": ""},
    ]


@pytest.mark.parametrize("text", ["", "what is [1, 2]?", "[", "[1, 2]", "[]", '[{"a": 1} and'])
def test_other_text_is_text(text: str) -> None:
    assert conversation_of(text, in_text=True) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([USER, {"content": "x"}], "message 1 has no `role`"),
        ([{"from": "martian", "value": "x"}], "message 0 is from `martian`"),
        ([{"from": 3, "value": "x"}], "message 0 is from `3`"),
        ([{"role": "user", "content": 3}], "message 0: its content is int"),
        ([{"role": None, "content": "x"}], "message 0 has no `role`"),
        ([{"role": "user", "text": "x"}], "message 0 has no `content`"),
        ([{"role": "user", "content": None}], "message 0 has no `content`"),
        ([{"from": "human", "text": "x"}], "message 0 has no `content`"),
    ],
)
def test_message_that_is_none_is_named(value: list[Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        conversation_of(value)


def test_message_of_the_assistant_at_the_end_is_the_answer() -> None:
    tool = [{"role": "assistant", "content": ""}, {"role": "tool", "content": "2"}]
    assert split_answer([USER, SAID]) == ([USER], SAID)
    assert split_answer([USER, *tool, SAID]) == ([USER, *tool], SAID)
    assert split_answer([USER]) == ([USER], None)
    assert split_answer([USER, SAID, USER]) == ([USER, SAID, USER], None)
    assert split_answer([SAID]) == ([SAID], None)


def test_a_prompt_is_text_or_messages_and_json_in_text_is_not_taken_for_text() -> None:
    written = json.dumps([USER, SAID])
    assert prompt_of("1+1?", chat=False) == ("1+1?", None)
    assert prompt_of("1+1?", chat=True) == ([USER], None)
    assert prompt_of(written, chat=True) == prompt_of([USER, SAID], chat=False) == ([USER], SAID)
    for value, why in ((written, "in a JSON string"), (3, "neither text nor messages")):
        with pytest.raises(TaskError, match=why):
            prompt_of(value, chat=False)


@pytest.mark.parametrize(
    ("row", "tools", "named"),
    [
        ({"prompt": "x", "source": "y", "tools": [1]}, True, []),
        ({"prompt": "x", "tools": [1]}, False, ["tools"]),
        ({"prompt": "x", "tools": None, "images": []}, False, []),
        ({"functions": [1], "chat_template_kwargs": {"a": 1}}, True, ["functions", "chat_templ"]),
        ({"system": "be brief"}, True, []),
    ],
)
def test_columns_that_mean_something_to_a_chat_and_are_not_shown_are_named(
    row: dict[str, Any], tools: bool, named: list[str]
) -> None:
    notes = list(unshown_columns([row], ["system"], tools=tools))
    assert len(notes) == len(named)
    assert all(f"`{name}" in note for note, name in zip(notes, named, strict=True))
