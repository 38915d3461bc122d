"""Tests of the arithmetic task: text, noise, answers."""

import random

import pytest

from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.tasks.arithmetic import Arithmetic

ROW = {"start": 3, "step": 7, "count": 3}
ANSWER = "c3 0 c2 7 c1 4 = 4"


def test_prompt_and_perfect_answer_of_a_row() -> None:
    task = Arithmetic(noise=0.0)
    assert task.prompt(ROW) == "3 7 c3 |"
    assert task.answer(ROW, random.Random(0)) == ANSWER
    assert task.reward(ROW, ANSWER, [ANSWER]) == 1.0


@pytest.mark.parametrize(
    "text", ["", "4", "= 5", "= 4 4", "= 4 =", "c1 4", "= 44", "=4", ANSWER.replace("= 4", "= 7")]
)
def test_only_the_right_sum_behind_the_last_equals_sign_counts(text: str) -> None:
    assert Arithmetic().reward(ROW, text, [text]) == 0.0


def test_share_of_wrong_sums_is_the_noise() -> None:
    task, wrong, total = Arithmetic(noise=0.25), 0, 0
    for prompt, answer in task.demonstrations(seed=1, count=400):
        start, step, _, _ = prompt.split()
        value = int(start)
        for shown in answer.split()[1:-2:2]:
            wrong += int(shown) != (value + int(step)) % 10
            total += 1
            value = int(shown)
    assert 0.25 * 0.9 * 0.85 < wrong / total < 0.25 * 0.9 * 1.15  # a tenth is right by chance


@pytest.mark.parametrize("options", [{"n_max": 0}, {"n_max": 61}, {"noise": 1.5}, {"noise": -0.1}])
def test_option_out_of_range_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"task\.options"):
        Arithmetic(**options)  # type: ignore[arg-type]
