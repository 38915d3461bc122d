"""Tests of the calculator task: turns, errors, demonstrations."""

from pathlib import Path

import pytest

from dora_pipe.core.errors import ConfigError
from dora_pipe.launch.examples import write_word_tokenizer
from dora_pipe.producers.chat.chat import Chat, ChatOptions
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calculator import (
    CHAT_TEMPLATE,
    ROLES,
    WORDS,
    CalculatorTask,
    calculator,
    read_turn,
)
from dora_pipe.producers.tasks.messages import normal

ROW = {"numbers": [17, 25, 64]}


@pytest.mark.parametrize(
    ("text", "reward"),
    [("answer 6", 1.0), ("n1 answer 6", 1.0), ("answer 7", 0.0), ("6", 0.0), ("answer 6 6", 0.0)],
)
def test_only_the_last_turn_and_its_sum_count(text: str, reward: float) -> None:
    assert CalculatorTask().reward(ROW, text, ["n2 call calculator 1 1", "2", text]) == reward


@pytest.mark.parametrize(
    "options",
    [{"max_numbers": 10}, {"min_numbers": 4, "max_numbers": 3}, {"noise": 2.0}, {"largest": 100}],
)
def test_option_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"task\.options"):
        CalculatorTask(**options)  # type: ignore[arg-type]


def test_a_row_is_a_message_and_a_function() -> None:
    task = CalculatorTask()
    message = {"role": "user", "content": "n3 17 n2 25 n1 64"}
    assert (task.prompt(ROW), task.tools(ROW)) == ([message], [calculator])


@pytest.mark.parametrize(
    ("text", "message", "calls"),
    [
        ("answer 6", "answer 6", []),
        ("n2 call calculator 17 25", "n2", [("calculator", {"a": 17, "b": 25})]),
        (
            "call calculator 1 2 call other 3 4",
            "",
            [("calculator", {"a": 1, "b": 2}), ("other", {"a": 3, "b": 4})],
        ),
        ("recall calculator 1 2", "recall calculator 1 2", []),
        ("n1 call", "n1", [("", {})]),
        ("n1 call calculator 1 n2", "n1", [("calculator", {})]),
    ],
)
def test_calls_are_read_from_a_turn(
    text: str, message: str, calls: list[tuple[str, dict[str, int]]]
) -> None:
    turn = read_turn(text)
    assert turn.text == message
    assert [(call.name, call.arguments) for call in turn.tool_calls] == calls
    assert all(bool(call.error) == (not call.arguments) for call in turn.tool_calls)
    assert " ".join(str(turn.message()["content"]).split()) in text


def test_conversations_demonstrated_end_as_the_calculator_says(tmp_path: Path) -> None:
    write_word_tokenizer(tmp_path, WORDS, ROLES)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer = Tokenizer(tmp_path)
    parser = "dora_pipe.producers.tasks.calculator:read_turn"
    chat = Chat.open(tmp_path, tokenizer, ChatOptions(tool_parser=parser))
    assert chat.flaw == ""
    right, task = 0, CalculatorTask(noise=0.5)
    for row in task.demonstrations(seed=3, count=40):
        assert isinstance(row, dict)
        messages = normal(row["messages"])
        ids, mask = chat.training_ids(messages, row["tools"])
        assert tokenizer.ids("<unk>")[0] not in ids
        turns = [message for message in messages if message["role"] == "assistant"]
        assert sum(mask) == sum(6 if "tool_calls" in turn else 3 for turn in turns)
        numbers = [int(word) for word in messages[0]["content"].split()[1::2]]
        right += int(task.reward({"numbers": numbers}, messages[-1]["content"], ()))
    assert 5 < right < 35
    assert task.demonstrations(seed=3, count=4) == task.demonstrations(seed=3, count=4)
