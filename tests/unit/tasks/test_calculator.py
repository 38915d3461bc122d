"""Tests of the calculator task: turns, errors, demonstrations."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import ConfigError
from dora_pipe.launch.examples import write_word_tokenizer
from dora_pipe.producers.chat.chat import Chat, ChatOptions
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.tasks.calculator import (
    CHAT_TEMPLATE,
    MODULUS,
    ROLES,
    SPARE_TURNS,
    TOOL,
    WORDS,
    Calculator,
    CalculatorTask,
    read_turn,
)
from dora_pipe.producers.tasks.messages import normal
from dora_pipe.producers.tasks.task import Observation

ROW = {"numbers": [17, 25, 64]}

numbers = st.lists(st.integers(0, MODULUS - 1), min_size=1, max_size=9)


def world() -> Calculator:
    opened = Calculator()
    opened.reset(ROW)
    return opened


@pytest.mark.parametrize("text", ["n2 call 17 + 25", "call 17 + 25", " n2 n9 call 17 + 25 "])
def test_call_is_answered_by_the_tool(text: str) -> None:
    assert world().step(text) == Observation(text="result 42", done=False, tool=TOOL)


@pytest.mark.parametrize(
    "text",
    ["", "call 17 +", "call 17 25", "call 17 + 25 n1", "answer", "recall 1 + 2", "call 1 + 222"],
)
def test_turn_that_is_neither_call_nor_answer_is_an_error(text: str) -> None:
    step = world().step(text)
    assert (step.text, step.done, step.ok) == ("error", False, False)


@pytest.mark.parametrize("text", ["nonsense", "call 1 + 1"])
def test_episode_ends_when_its_turns_are_used_up(text: str) -> None:
    opened = world()
    done = [opened.step(text).done for _ in range(len(ROW["numbers"]) + SPARE_TURNS)]
    assert done == [False] * (len(done) - 1) + [True]


@pytest.mark.parametrize(
    ("text", "reward"),
    [("answer 6", 1.0), ("n1 answer 6", 1.0), ("answer 7", 0.0), ("6", 0.0), ("answer 6 6", 0.0)],
)
def test_only_the_last_turn_and_its_sum_count(text: str, reward: float) -> None:
    assert CalculatorTask().reward(ROW, text, ["n2 call 1 + 1", "result 2", text]) == reward


@given(row=st.fixed_dictionaries({"numbers": numbers}))
def test_perfect_episode_is_what_the_calculator_would_say_and_is_right(
    row: dict[str, list[int]],
) -> None:
    task, opened = CalculatorTask(noise=0.0), Calculator()
    context = opened.reset(row)
    pairs = task.episode(row, random.Random(0))
    assert len(pairs) == len(row["numbers"])
    for before, turn in pairs:
        assert before == context
        step = opened.step(turn)
        context = f"{context} {turn} <eos> {step.text}"
    assert step.done
    assert task.reward(row, pairs[-1][1], []) == 1.0


@pytest.mark.parametrize(
    "options",
    [{"max_numbers": 10}, {"min_numbers": 4, "max_numbers": 3}, {"noise": 2.0}, {"largest": 100}],
)
def test_option_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"task\.options"):
        CalculatorTask(**options)  # type: ignore[arg-type]


# A tool and a chat template.

TOOLED = CalculatorTask(tools=True, noise=0.5)


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
    right = 0
    for row in TOOLED.demonstrations(seed=3, count=40):
        assert isinstance(row, dict)
        messages = normal(row["messages"])
        ids, mask = chat.training_ids(messages, row["tools"])
        assert tokenizer.ids("<unk>")[0] not in ids
        turns = [message for message in messages if message["role"] == "assistant"]
        assert sum(mask) == sum(6 if "tool_calls" in turn else 3 for turn in turns)
        numbers = [int(word) for word in messages[0]["content"].split()[1::2]]
        right += int(TOOLED.reward({"numbers": numbers}, messages[-1]["content"], ()))
    assert 5 < right < 35
    assert TOOLED.demonstrations(seed=3, count=4) == TOOLED.demonstrations(seed=3, count=4)
