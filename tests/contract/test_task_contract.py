"""Contract of every built-in task: data, prompts, rewards, demonstrations."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from dora_pipe.config import model
from dora_pipe.producers.tasks import arithmetic, calculator
from dora_pipe.producers.tasks.registry import BUILT_IN, open_task, reward_digest, rows_digest
from dora_pipe.producers.tasks.task import Row, Split, Task

JSONL_REWARD = "def score(row, text):\n    return float(text.strip() == row['answer'])\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    config: model.Task
    right: Callable[[Row], str]
    wrong: Callable[[Row], str]
    words: frozenset[str] | None = None


def sum_of(row: Row) -> int:
    return int(row["start"] + row["count"] * row["step"]) % 10


@pytest.fixture(params=sorted(BUILT_IN))
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    if request.param == "arithmetic":
        return Case(
            config=model.Task(kind="arithmetic", options={"noise": 0.0, "count": 200}),
            right=lambda row: f"c1 3 = {sum_of(row)}",
            wrong=lambda row: f"c1 3 = {(sum_of(row) + 1) % 10}",
            words=frozenset(arithmetic.WORDS),
        )
    if request.param == "calculator":
        return Case(
            config=model.Task(kind="calculator", options={"noise": 0.0, "count": 200}),
            right=lambda row: f"answer {sum(row['numbers']) % 100}",
            wrong=lambda row: f"answer {(sum(row['numbers']) + 1) % 100}",
            words=frozenset(calculator.WORDS) | {"<eos>"},
        )
    name = f"contract_reward_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(JSONL_REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    for split, first in (("train", 0), ("eval", 100)):
        rows = [{"prompt": f"say {n}:", "answer": f"<{n}>"} for n in range(first, first + 40)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{split}.jsonl").write_text(lines)
    return Case(
        config=model.Task(
            kind="dataset",
            data=str(tmp_path / "train.jsonl"),
            eval_data=str(tmp_path / "eval.jsonl"),
            reward=f"{name}:score",
        ),
        right=lambda row: str(row["answer"]),
        wrong=lambda row: str(row["answer"])[1:],
    )


@pytest.fixture
def task(case: Case) -> Task:
    return open_task(case.config)


def prompt_of(task: Task, row: Row) -> str:
    world = task.environment(row)
    result = task.prompt(row) if world is None else world.reset(row)
    assert isinstance(result, str)
    return result


def test_rows_are_the_same_every_time_they_are_asked_for(case: Case, task: Task) -> None:
    for split in ("train", "eval"):
        assert list(task.rows(split)) == list(open_task(case.config).rows(split))
        assert len(task.rows(split)) > 0
    assert list(task.rows("train"))[:20] != list(task.rows("eval"))[:20]


def test_rows_are_plain_json(task: Task) -> None:
    rows = list(task.rows("train"))
    assert msgspec.json.decode(msgspec.json.encode(rows)) == rows


def digests(task: Task) -> list[tuple[str, int]]:
    splits: tuple[Split, ...] = ("train", "eval")
    return [rows_digest(task.rows(split), split) for split in splits]


def test_digests_are_stable_and_tell_the_splits_apart(case: Case, task: Task) -> None:
    again = open_task(case.config)
    train, eval_ = digests(task)
    assert digests(again) == [train, eval_]
    assert train[0] != eval_[0]
    assert len(train[0]) == 64
    assert train[1] == len(task.rows("train"))
    assert reward_digest(task) == reward_digest(again) != ""


def test_right_answer_gets_one_and_a_wrong_or_empty_one_zero(case: Case, task: Task) -> None:
    for row in task.rows("train")[:20]:
        right, wrong = case.right(row), case.wrong(row)
        assert task.reward(row, right, [right]) == 1.0
        assert task.reward(row, wrong, [wrong]) == 0.0
        assert task.reward(row, "", [""]) == 0.0


def test_demonstrations_without_noise_are_perfect(task: Task) -> None:
    pairs = task.demonstrations(seed=5, count=50)
    assert len(pairs) == 50
    prompts = {prompt_of(task, row): row for row in [*task.rows("train"), *task.rows("eval")]}
    checked = 0
    for prompt, answer in pairs:
        row = prompts.get(prompt)
        if row is not None and task.environment(row) is None:
            assert task.reward(row, answer, [answer]) == 1.0
            checked += 1
    assert checked or task.environment(task.rows("train")[0]) is not None


def test_demonstrations_are_a_function_of_their_seed(task: Task) -> None:
    assert task.demonstrations(seed=5, count=30) == task.demonstrations(seed=5, count=30)
    assert task.demonstrations(seed=5, count=30) != task.demonstrations(seed=6, count=30)


def test_prompts_and_demonstrations_use_no_word_without_a_token(case: Case, task: Task) -> None:
    if case.words is None:
        pytest.skip("a task of any text")
    texts = [prompt_of(task, row) for row in task.rows("train")[:50]]
    texts += [text for pair in task.demonstrations(seed=1, count=50) for text in pair]
    assert {word for text in texts for word in text.split()} <= case.words


def test_evaluation_rows_do_not_depend_on_the_seed_option(case: Case, task: Task) -> None:
    if case.config.kind == "dataset":
        pytest.skip("its rows are files")
    options = {**case.config.options, "seed": 77}
    other = open_task(msgspec.structs.replace(case.config, options=options))
    (train, eval_), (other_train, other_eval) = digests(task), digests(other)
    assert (other_eval, other_train != train) == (eval_, True)
