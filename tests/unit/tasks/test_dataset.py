"""Tests of rows from files and their errors."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.rewards.registry import Rewards
from dora_pipe.producers.tasks.dataset import DatasetTask
from dora_pipe.producers.tasks.task import Reward, Row

Write = Callable[[str | bytes], Path]

REWARD = """
from dora_pipe.producers.tasks.task import Reward, Row
class Scorer:
    @staticmethod
    def score(row, text): return 0.25
def add(a: int, b: int) -> int:
    "Adds."
    return a + b
def answered(row, text): return float(text == row["answer"])
def score(row, text):
    return Reward(value=row["weight"] * (text == row["answer"]), raw=1.0)
"""


def read(path: Path) -> Sequence[Row]:
    return DatasetTask(data=str(path), reward="rewards:score").rows("train")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(content: str | bytes) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"jsonl_reward_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n\n[1]\n', "line 3: Expected `object`, got `array`"),
        ('{"answer": "a"}\n', "line 1: no text in `prompt`"),
        ('{"prompt": 3}\n', "line 1: no text in `prompt`"),
        ('{"prompt": "a", "x": Infinity}\n', "line 1: Infinity is not a JSON number"),
    ],
)
def test_row_that_cannot_be_read_is_named_with_file_and_line(
    write: Write, content: str | bytes, message: str
) -> None:
    path = write(content)
    with pytest.raises(TaskError) as caught:
        read(path)
    assert str(path) in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ('{\n  "prompt": "a"\n}\n', "a row is one line; an array of objects"),
        ('{"prompt": ["a"]}', "it has a list of str; a message has `role` and `content`"),
        ('{"prompt": []}', "it has an empty list; a message has `role` and `content`"),
        ('{"prompt": 3}', "it has int; task.columns"),
        ('{"prompt": null, "promt": "a"}', "did you mean `promt`?"),
    ],
)
def test_a_hint_names_another_way_than_the_one_that_failed(
    write: Write, content: str, hint: str
) -> None:
    with pytest.raises(TaskError) as caught:
        read(write(content))
    assert hint in (caught.value.hint or "")


def test_reward_is_the_users_function_of_row_and_text(write: Write, module: str) -> None:
    path = write('{"prompt": "a", "answer": "b", "weight": 0.5}\n')
    task = DatasetTask(data=str(path), reward=f"{module}:score")
    row = task.rows("train")[0]
    assert task.reward(row, "b", ["b"]) == Reward(value=0.5, raw=1.0)
    nested = DatasetTask(data=str(path), reward=f"{module}:Scorer.score")
    assert nested.reward(row, "b", ["b"]) == 0.25


def test_rows_are_read_without_running_the_users_module(write: Write) -> None:
    task = DatasetTask(data=str(write('{"prompt": "a"}')), reward="no_such_module_here:score")
    assert len(task.rows("train")) == 1
    assert task.rows("eval") == []
    with pytest.raises(TaskError, match="cannot import `no_such_module_here`"):
        task.reward(task.rows("train")[0], "", [])


def test_data_and_reward_are_required() -> None:
    with pytest.raises(ConfigError, match=r"task\.data"):
        DatasetTask(reward="a:b")
    with pytest.raises(ConfigError, match=r"task\.reward"):
        DatasetTask(data="x.jsonl")


# Conversations.


def conversing(write: Write, module: str, row: dict[str, Any], **keys: Any) -> tuple[Any, Any]:
    path = write(json.dumps(row) + "\n")
    task = DatasetTask(data=str(path), reward=f"{module}:answered", **keys)
    return task, task.rows("train")[0]


USER = {"role": "user", "content": "1+1?"}
SAID = {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "be terse"}


@pytest.mark.parametrize(
    ("row", "keys", "prompt"),
    [
        ({"prompt": "1+1?"}, {}, "1+1?"),
        ({"prompt": "1+1?"}, {"chat": True}, [USER]),
        ({"prompt": "1+1?"}, {"system_prompt": "be terse"}, [SYSTEM, USER]),
        ({"prompt": [USER]}, {}, [USER]),
        ({"messages": [USER, SAID]}, {"columns": {"prompt": "messages"}}, [USER]),
        ({"prompt": [SYSTEM, USER]}, {"system_prompt": "be kind"}, [SYSTEM, USER]),
        ({"prompt": json.dumps([USER, SAID])}, {"chat": True}, [USER]),
    ],
)
def test_prompt_is_text_or_the_conversation_without_its_answer(
    write: Write, module: str, row: dict[str, Any], keys: dict[str, Any], prompt: object
) -> None:
    task, result = conversing(write, module, row, **keys)
    assert task.prompt(result) == prompt


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"prompt": [USER, SAID]}, "2"),
        ({"prompt": [USER, SAID], "answer": "two"}, "two"),
        ({"prompt": [USER, SAID], "answer": None}, "2"),
        ({"prompt": "1+1?", "answer": "2"}, "2"),
        ({"prompt": json.dumps([USER, SAID])}, "2"),
    ],
)
def test_reward_finds_the_answer_of_the_row_or_of_its_conversation(
    write: Write, module: str, row: dict[str, Any], answer: str
) -> None:
    task, result = conversing(write, module, row, chat=True)
    assert task.reward(result, answer, [answer]) == 1.0
    assert task.reward(result, "3", ["3"]) == 0.0
    assert result == row, "the row is what the data have"


def test_tools_are_functions_by_their_names(write: Write, module: str) -> None:
    task, row = conversing(write, module, {"prompt": [USER]}, tools=(f"{module}:add",))
    assert [tool.__name__ for tool in task.tools(row)] == ["add"]
    assert task.tools(row)[0] in task.reward_sources()
    assert not task.single_turn()
    assert conversing(write, module, {"prompt": [USER]})[0].single_turn()
    task, row = conversing(write, module, {"prompt": [USER]}, tools=(f"{module}:ad",))
    with pytest.raises(TaskError, match=r"task\.tools: .* has no `ad`"):
        task.tools(row)


ADD = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def test_a_rows_own_tools_are_shown_and_called_where_there_are_functions(
    write: Write, module: str
) -> None:
    row = {"prompt": [USER, {**SAID, "content": None, "tool_calls": [{"function": ADD}]}]}
    task, shown = conversing(write, module, {**row, "tools": [ADD]})
    schema = {"type": "function", "function": ADD}
    assert (task.shown_tools(shown), task.tools(shown)) == ((schema,), ())
    assert task.single_turn()
    with pytest.raises(TaskError, match="has no `answer`"):
        DatasetTask(data=str(write(json.dumps(row))), reward="exact").check()
    functions = {"tools": (f"{module}:add", f"{module}:score")}
    task, shown = conversing(write, module, {**row, "tools": json.dumps([ADD])}, **functions)
    assert [tool.__name__ for tool in task.tools(shown)] == ["add"]
    task, shown = conversing(write, module, {**row, "tools": [{"name": "sub"}]}, **functions)
    with pytest.raises(TaskError, match="`sub` has no function"):
        task.tools(shown)
    task, shown = conversing(write, module, {"prompt": "text", "tools": [ADD]})
    assert task.shown_tools(shown) == ()
    assert ["`tools`" in note for note in task.notes()] == [True]


@pytest.mark.parametrize("keys", [{"eval_data": "x.jsonl"}, {"eval_split": "test"}])
def test_evaluation_data_are_given_once(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"task\.eval_share: excludes task\.eval_data"):
        DatasetTask(data="a.jsonl", reward="a:b", eval_share=0.1, **keys)


def test_demonstrations_of_conversations_end_with_the_answer(write: Write, module: str) -> None:
    rows = [{"prompt": [USER, SAID]}, {"prompt": [USER], "answer": "two"}]
    path = write("".join(json.dumps(row) + "\n" for row in rows))
    task = DatasetTask(data=str(path), reward="a:b", system_prompt="be terse")
    shown = task.demonstrations(seed=1, count=2)
    message = {"role": "assistant", "content": "two"}
    assert [line["messages"] for line in shown if isinstance(line, dict)] in (
        [[SYSTEM, USER, SAID], [SYSTEM, USER, message]],
        [[SYSTEM, USER, message], [SYSTEM, USER, SAID]],
    )
    with_tools = DatasetTask(data=str(path), reward="a:b", tools=(f"{module}:add",))
    (first, _) = with_tools.demonstrations(seed=1, count=2)
    assert isinstance(first, dict)
    assert [tool.__name__ for tool in first["tools"]] == ["add"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": [USER]}], "row 0 has no text in `answer`"),
        ([{"prompt": [USER, SAID]}, {"prompt": "a", "answer": "b"}], "row . has no "),
    ],
)
def test_demonstrations_are_of_one_kind_and_have_answers(
    write: Write, rows: list[dict[str, Any]], message: str
) -> None:
    task = DatasetTask(
        data=str(write("".join(json.dumps(row) + "\n" for row in rows))), reward="a:b"
    )
    with pytest.raises(TaskError, match=message):
        task.demonstrations(seed=1, count=2)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "1+1="}, "the first row has no `answer`, which task.reward compares with"),
        ({"prompt": "1+1=", "answer": None}, "the first row: the row's answer is null"),
        (
            {"prompt": "1+1=", "answer": {"a": 1}},
            "an object with 'a': set the reward's option `field`",
        ),
        ({"prompt": [{"role": "wizard", "content": "x"}], "answer": "1"}, "role is 'wizard'"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image_url"}]}], "answer": "1"},
            "only text is supported",
        ),
    ],
)
def test_what_no_row_could_do_with_is_said_before_anything_starts(
    row: dict[str, Any], why: str, write: Write
) -> None:
    with pytest.raises(TaskError, match=why):
        DatasetTask(data=str(write(json.dumps(row))), reward="exact").check()


JUDGE = {"model": "judge", "url": "http://127.0.0.1:1/v1"}


@pytest.mark.parametrize(
    ("use", "options"),
    [("exact", {"of": "reasoning"}), ("judge", {**JUDGE, "prompt": "{{ reasoning }}"})],
)
def test_reasoning_needs_prompts_of_messages(
    write: Write, use: str, options: dict[str, Any]
) -> None:
    uses = [model.RewardUse(use=use, options=options)]
    path = write(json.dumps({"prompt": "1+1=", "answer": "2"}))
    with pytest.raises(TaskError, match="looks at the reasoning"):
        DatasetTask(data=str(path), reward=Rewards(uses)).check()
    DatasetTask(data=str(path), reward=Rewards(uses), chat=True).check()
    other = "{{ text }}" if "prompt" in options else ""
    uses = [model.RewardUse(use=use, options={**JUDGE, "prompt": other} if other else {})]
    DatasetTask(data=str(path), reward=Rewards(uses)).check()


def test_a_tool_that_cannot_be_told_is_said_before_anything_starts(
    write: Write, module: str
) -> None:
    path = write(json.dumps({"prompt": "1+1=", "answer": "2"}))
    task = DatasetTask(data=str(path), chat=True, reward="exact", tools=[f"{module}:score"])
    with pytest.raises(TaskError, match="parameter `row` of tool `score` has no annotation"):
        task.check()
    DatasetTask(data=str(path), chat=True, reward="exact", tools=[f"{module}:add"]).check()
