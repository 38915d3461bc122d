"""Tests of reasoning-gym generators as tasks (`make test-adapters`)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.tasks.registry import rows_digest
from dora_pipe.producers.tasks.task import Reward, Row, Task
from tests.support.adapters_of_others import task_of

pytest.importorskip("reasoning_gym", reason="reasoning-gym is not here: make test-adapters")

SUMS = "reasoning-gym:chain_sum"


def score(task: Task, row: Row, text: str) -> Reward:
    reward = task.reward(row, text, [text])
    assert isinstance(reward, Reward)
    return reward


def test_the_right_answer_is_worth_one_with_or_without_tags() -> None:
    task = task_of(SUMS, count=8, eval_count=3)
    for row in (*task.rows("train"), *task.rows("eval")):
        assert score(task, row, f"well <answer>{row['answer']}</answer>").value == 1.0
        assert score(task, row, f" {row['answer']} ") == Reward(value=1.0, answer=row["answer"])
        assert score(task, row, "<answer>x</answer>").value < 1.0
    plain = task_of(SUMS, count=1, tag="")
    row = plain.rows("train")[0]
    assert score(plain, row, f"<answer>{row['answer']}</answer>").value < 1.0


def test_a_puzzle_with_many_answers_is_scored_by_its_generator() -> None:
    task = task_of("reasoning-gym:countdown", count=2, arguments={"min_numbers": 3})
    row = task.rows("train")[1]
    assert score(task, row, row["answer"]).value == 1.0
    assert score(task, row, f"({row['answer']})").value == 1.0
    assert score(task, row, "1 + 1").value < 1.0


@pytest.mark.parametrize("name", ["chain_sum", "list_functions", "maze"])
def test_rows_follow_from_the_seed_alone(name: str) -> None:
    kind, before = f"reasoning-gym:{name}", random.getstate()
    entry, again = (task_of(kind, count=6, eval_count=2) for _ in range(2))
    other = task_of(kind, count=6, eval_count=2, seed=5)
    assert rows_digest(entry.rows("train"), "train") == rows_digest(again.rows("train"), "train")
    assert rows_digest(entry.rows("eval"), "eval") == rows_digest(other.rows("eval"), "eval")
    assert rows_digest(entry.rows("train"), "train") != rows_digest(other.rows("train"), "train")
    assert (len(entry.rows("train")), len(entry.rows("eval"))) == (6, 2)
    assert random.getstate() == before
    assert entry.single_turn()


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("reasoning-gym:chain_summ", {}, "reasoning-gym has no `chain_summ`"),
        (SUMS, {"arguments": {"size": 3}}, "task.options.arguments.size"),
        (SUMS, {"arguments": {"min_terms": 9, "max_terms": 2}}, "max_terms"),
    ],
)
def test_what_is_no_generator_is_refused_by_name(
    kind: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        task_of(kind, **options)
    assert text in caught.value.message
