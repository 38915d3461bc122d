"""Tests of group rewards and their sum with single ones."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.config.load import from_plain
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.rewards.registry import Rewards, open_rewards
from dora_pipe.producers.tasks.messages import NoAnswer
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.producers.tasks.server import scored_together
from dora_pipe.producers.tasks.task import Completion, Reward, Row, Split, Task

HERE = __name__
ROW = {"prompt": "6 * 7 =", "answer": "42"}
SAID = tuple(Completion(text=text, turns=(text,)) for text in ("42", "forty two", "7"))


def shortest(row: Row, completions: Sequence[Completion]) -> list[float]:
    least = min(len(completion.text) for completion in completions)
    return [float(len(completion.text) == least) for completion in completions]


def named(
    *, texts: list[str], answer: str, completions: Any, row: Row, add: float = 0.0
) -> list[Reward]:
    assert completions is SAID and row is ROW
    return [Reward(value=add + (text == answer), parts={"inner": 1.0}) for text in texts]


async def slow(completions: Sequence[Completion]) -> list[float]:
    await asyncio.sleep(0)
    return [float(index) for index, _ in enumerate(completions)]


def abstains(row: Row, completions: Sequence[Completion]) -> list[None]:
    return [None for _ in completions]


def abstains_of_one(row: Row, texts: Sequence[str]) -> list[float | None]:
    return [None if text == "7" else 1.0 for text in texts]


def misnamed(completionz: Any) -> list[float]:
    return []


class Scored:
    def __init__(self, times: float) -> None:
        self.times = times

    def __call__(self, texts: list[str]) -> list[float]:
        return [self.times * len(text) for text in texts]


def rewards(*uses: model.RewardUse) -> Rewards:
    return open_rewards(model.Task(kind="dataset", reward=uses))


def of_group(name: str, weight: float = 1.0, **options: Any) -> model.RewardUse:
    return model.RewardUse(use=f"{HERE}:{name}", weight=weight, options=options, group=True)


def asked(result: Any) -> Any:
    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


@pytest.mark.parametrize(
    ("use", "values"),
    [
        (of_group("shortest", 0.5), [0.0, 0.0, 0.5]),
        (of_group("named", 2.0, add=0.25), [2.5, 0.5, 0.5]),
        (of_group("slow"), [0.0, 1.0, 2.0]),
        (of_group("Scored", 0.1, times=10.0), [2.0, 9.0, 1.0]),
    ],
    ids=["row and completions", "keywords", "async", "class"],
)
def test_a_function_of_groups_gives_a_number_per_answer(
    use: model.RewardUse, values: list[float]
) -> None:
    result = asked(rewards(use).score_group(ROW, SAID))
    assert [record.value for record in result] == pytest.approx(values)
    assert [entry.parts[use.called] * use.weight for entry in result] == pytest.approx(values)


def test_those_of_one_answer_are_asked_apart_and_without_any_it_is_0() -> None:
    both = rewards(model.RewardUse(use="exact"), of_group("shortest"))
    alone = asked(both.score(ROW, SAID[0]))
    assert (alone.value, alone.raw, alone.parts) == (1.0, 1.0, {"exact": 1.0})
    assert [set(entry.parts) for entry in asked(both.score_group(ROW, SAID))] == [{"shortest"}] * 3
    none = asked(rewards(of_group("shortest")).score(ROW, SAID[0]))
    assert (none.value, none.raw, none.parts) == (0.0, None, {})


def test_a_parameter_that_is_none_of_a_group_is_one_line() -> None:
    with pytest.raises(ConfigError, match="parameter `completionz`"):
        rewards(of_group("misnamed")).score_group(ROW, SAID)


def test_rewards_of_the_package_are_of_one_answer() -> None:
    plain = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "m"},
        "task": {"kind": "dataset", "data": "x", "reward": [{"use": "exact", "group": True}]},
    }
    with pytest.raises(ConfigError, match="`exact` scores single answers"):
        from_plain(plain)


class Ranks(Task):
    def rows(self, split: Split) -> Sequence[Row]:
        return [ROW]

    def prompt(self, row: Row) -> str:
        return str(row["prompt"])

    def score_group(self, row: Row, completions: Sequence[Completion]) -> Sequence[float]:
        return shortest(row, completions)


class Deaf(Task):
    def __init__(self, reward: Rewards) -> None:
        self.asked = reward


def test_a_task_may_have_a_score_group_alone() -> None:
    task = open_task(model.Task(kind=f"{HERE}:Ranks"))
    assert task.scores_groups() and not Task().scores_groups()
    assert task.score(ROW, SAID[0]) == 0.0
    with pytest.raises(NotImplementedError):
        Task().reward(ROW, "", ())


def test_a_task_that_does_not_pass_rewards_of_groups_on_is_refused() -> None:
    task = model.Task(kind=f"{HERE}:Deaf", reward=(of_group("shortest"),))
    with pytest.raises(ConfigError, match="does not support group rewards"):
        open_task(task)


def test_none_abstains_among_the_rewards_of_a_group() -> None:
    uses = [of_group("abstains_of_one", 2.0), of_group("shortest")]
    result: Any = Rewards(uses).score_group(ROW, SAID)
    assert [record.value for record in result] == [2.0, 2.0, 3.0]
    assert result[2].parts == {"abstains_of_one.abstained": 1.0, "shortest": 1.0}


def test_a_group_of_which_all_abstain_keeps_the_rewards_that_its_answers_have_alone() -> None:
    alone = model.RewardUse(use="exact")
    result: Any = Rewards([alone, of_group("abstains")]).score_group(ROW, SAID)
    assert result == [Reward(value=0.0, parts={"abstains.abstained": 1.0})] * 3
    for uses in ([of_group("abstains")], [alone, of_group("abstains_of_one")]):
        with pytest.raises(NoAnswer, match="every reward abstained"):
            Rewards(uses).score_group(ROW, SAID)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (3.0, "gave float, not a number per completion"),
        ("12", "gave str"),
        ([1.0], "gave 1 numbers for 2 completions"),
        ([1.0, float("nan")], "is nan"),
        ([1.0, "x"], "not a number"),
    ],
)
def test_what_is_no_answer_of_score_group_is_named(result: object, text: str) -> None:
    with pytest.raises(NoAnswer, match=text):
        scored_together("g/1", result, 2)
