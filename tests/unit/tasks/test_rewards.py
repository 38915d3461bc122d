"""Tests of configured rewards: functions, arguments, sums."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config import model
from dora_pipe.config.load import changed_keys, dump_toml, from_plain, load_config
from dora_pipe.core.errors import ConfigError, DoraError, TaskError
from dora_pipe.producers.rewards.registry import Rewards
from dora_pipe.producers.tasks.dataset import DatasetTask
from dora_pipe.producers.tasks.messages import NoAnswer
from dora_pipe.producers.tasks.registry import open_task, reward_digest
from dora_pipe.producers.tasks.task import (
    Completion,
    Environment,
    Observation,
    Reward,
    Row,
    Split,
    Task,
)

HERE = __name__

ROW = {"prompt": "6 * 7 =", "answer": "42"}
SAID = Completion(text="42", turns=("?", "!", "42"), messages=({"role": "user"},))


def brevity(text: str, words: int = 10) -> float:
    return 1 - len(text.split()) / words


def everything(
    *, row: Row, text: str, turns: Any, messages: Any, completion: Any, answer: str
) -> float:
    assert (row, completion, text, answer) == (ROW, SAID, "42", "42")
    assert (turns, messages) == (SAID.turns, SAID.messages)
    return 0.5


def other_and_answer(question: Any, answer: Any) -> float:
    raise AssertionError


def with_parts(text: str) -> Reward:
    return Reward(value=0.5, raw=7.0, parts={"form": 1.0})


async def slow(text: str) -> float:
    await asyncio.sleep(0)
    return 0.25


STOPPED: list[str] = []

without_signature = max


BATCHES: list[int] = []


def several(rows: Any, texts: list[str], add: float = 0.0) -> list[float]:
    BATCHES.append(len(texts))
    if "fail" in texts:
        raise KeyError("mine")
    return [len(text) + add for text in texts if text != "lost"]


async def several_later(completions: Any, answers: list[str]) -> list[float]:
    return [
        float(completion.text == answer)
        for completion, answer in zip(completions, answers, strict=True)
    ]


def abstains(text: str) -> None:
    return None


async def abstains_later(text: str) -> None:
    return None


def some_abstain(texts: list[str]) -> list[float | None]:
    return [None if text == "42" else 1.0 for text in texts]


def misspelt(txt: str) -> float:
    return 0.0


class Counting:
    def __init__(self, first: int = 0) -> None:
        self.count = first

    def __call__(self, text: str) -> float:
        self.count += 1
        return float(self.count)


def use(name: str, weight: float = 1.0, **options: Any) -> model.RewardUse:
    reference = name if ":" in name or name in ("exact",) else f"{HERE}:{name}"
    return model.RewardUse(use=reference, weight=weight, options=options)


def test_the_value_is_the_weighted_sum_and_raw_the_first_score() -> None:
    rewards = Rewards([use("exact"), use("brevity", -0.5, words=4), use("with_parts", 2.0)])
    assert rewards.score(ROW, SAID) == Reward(
        value=1.0 - 0.5 * 0.75 + 2.0 * 0.5,
        raw=1.0,
        parts={"exact": 1.0, "brevity": 0.75, "with_parts": 0.5, "with_parts.form": 1.0},
        answer="42",
    )


def test_none_abstains_and_the_weights_of_the_others_grow() -> None:
    rewards = Rewards([use("abstains", 3.0), use("exact"), use("brevity", -0.5, words=4)])
    assert rewards.score(ROW, SAID) == Reward(
        value=(1.0 - 0.5 * 0.75) * 4.5 / 1.5,
        raw=None,
        parts={"abstains.abstained": 1.0, "exact": 1.0, "brevity": 0.75},
        answer="42",
    )
    of_lists = asyncio.run(_of(Rewards([use("exact"), use("some_abstain"), use("abstains_later")])))
    parts = {"exact": 1.0, "some_abstain.abstained": 1.0, "abstains_later.abstained": 1.0}
    assert (of_lists.value, of_lists.parts) == (3.0, parts)


def test_where_all_abstain_there_is_no_score() -> None:
    with pytest.raises(NoAnswer, match="every reward abstained: abstains"):
        Rewards([use("abstains")]).score(ROW, SAID)
    with pytest.raises(NoAnswer, match="every reward abstained: some_abstain, abstains"):
        asyncio.run(_of(Rewards([use("some_abstain"), use("abstains")])))
    with pytest.raises(NoAnswer, match=r"every reward abstained: abstains$"):
        Rewards([use("abstains"), use("exact", 0.0)]).score(ROW, SAID)
    only_shown = Rewards([use("abstains", 0.0), use("exact", 0.0)]).score(ROW, SAID)
    assert isinstance(only_shown, Reward)
    assert only_shown.value == 0.0


def test_a_function_is_given_what_its_parameters_name() -> None:
    assert Rewards([use("everything")]).score(ROW, SAID) == Reward(
        value=0.5, raw=0.5, parts={"everything": 0.5}
    )


def value(scored: Any) -> float:
    assert isinstance(scored, Reward)
    return scored.value


async def _of(rewards: Rewards) -> Any:
    return await rewards.score(ROW, SAID)  # type: ignore[misc]


def test_async_functions_are_waited_for_together() -> None:
    result = asyncio.run(_of(Rewards([use("exact"), use("slow", 4.0)])))
    assert result == Reward(value=2.0, raw=1.0, parts={"exact": 1.0, "slow": 0.25}, answer="42")


def _several(rewards: Rewards, texts: list[str]) -> list[Any]:
    async def ask() -> list[Any]:
        asked = [rewards.score(ROW, Completion(text=text)) for text in texts]
        return await asyncio.gather(*asked, return_exceptions=True)  # type: ignore[arg-type]

    BATCHES.clear()
    return asyncio.run(ask())


def test_a_function_of_lists_is_asked_of_what_waits() -> None:
    several = _several(Rewards([use("several", add=0.5)]), ["a" * n for n in range(150)])
    assert [record.value for record in several] == [n + 0.5 for n in range(150)]
    assert BATCHES == [64, 64, 22]
    both = Rewards([use("several_later"), use("several", 0.5)])
    assert [record.value for record in _several(both, ["42", "no"])] == [2.0, 1.0]


@pytest.mark.parametrize(("text", "error"), [("fail", KeyError), ("lost", NoAnswer)])
def test_a_function_of_lists_fails_for_all_that_it_was_asked_of(
    text: str, error: type[Exception]
) -> None:
    several = _several(Rewards([use("several")]), ["a", text])
    assert [type(event) for event in several] == [error, error]


@pytest.mark.parametrize(
    ("uses", "error", "message", "hint"),
    [
        ("misspelt", ConfigError, "has a parameter `txt`, not an argument", "`text`"),
        ("without_signature", ConfigError, "no signature found", "from a Python function"),
        ("other_and_answer", ConfigError, "has a parameter `question`, not an argument", None),
        ("nothing", TaskError, "has no `nothing`", None),
        ("STOPPED", TaskError, "is not a function", None),
        ("mathematics:x", TaskError, "cannot import `mathematics`", None),
    ],
)
def test_a_function_that_cannot_be_asked_is_one_line(
    uses: str, error: type[DoraError], message: str, hint: str | None
) -> None:
    with pytest.raises(error, match=message) as caught:
        Rewards([use(uses)]).sources()
    assert hint is None or hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("uses", "message"),
    [
        (use("brevity", word=3), "has no option `word`"),
        (use("Counting", last=3), "options: got an unexpected keyword argument 'last'"),
        (model.RewardUse(use="exakt"), r"task.reward\[0\]: unknown reward `exakt`"),
    ],
)
def test_an_option_or_name_that_is_none_is_one_line(uses: model.RewardUse, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rewards([uses]).sources()


def test_a_reward_that_needs_an_extra_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match="`math` needs math-verify") as caught:
        Rewards([model.RewardUse(use="math")]).sources()
    assert caught.value.hint == "pip install -e '.[rewards]'"


def digest(*uses: model.RewardUse) -> str:
    task = DatasetTask(data="rows.jsonl", reward=Rewards(uses))
    return reward_digest(task)


def test_weights_options_and_versions_of_libraries_are_digested(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    math = model.RewardUse(use="math")
    observed = [
        digest(use("exact")),
        digest(use("exact", 0.5)),
        digest(use("exact", case=False)),
        digest(use("exact"), use("brevity")),
        digest(math),
    ]
    assert observed[0] == digest(use("exact"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1")
    assert len({*observed, digest(math)}) == 6


def test_a_list_is_written_and_read_back_the_same(tmp_path: Path) -> None:
    uses = [{"use": "math"}, {"use": "m:f", "weight": 0.1, "options": {"words": [1, {"a": "x"}]}}]
    config = from_plain({**PLAIN, "task": {"kind": "dataset", "reward": uses}})
    (tmp_path / "config.toml").write_text(dump_toml(config))
    again = load_config(tmp_path / "config.toml", [])
    assert again.task.rewards == config.task.rewards
    changed = msgspec.structs.replace(config.task, reward=config.task.rewards[:1])
    frozen, _, _ = changed_keys(config, msgspec.structs.replace(config, task=changed))
    assert frozen == {"task.reward"}


PLAIN: dict[str, Any] = {"run": {"name": "a", "steps": 1}, "model": {"path": "m"}}


def _config(**task: Any) -> None:
    from_plain({**PLAIN, "task": {"kind": "dataset", **task}})


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({"reward": [{"use": "math"}, {"use": "math"}]}, "used twice: `math`"),
        ({"reward": [{"use": "math", "weight": 0.0}]}, "the weight is 0"),
        ({"reward": [{"use": "math", "weight": float("nan")}]}, "task.reward"),
        ({"reward": [{"use": "math", "wait": 1}]}, "task.reward"),
        ({"reward": [{"use": "math", "name": "a.b"}]}, "task.reward"),
    ],
)
def test_a_list_that_does_not_fit_together_is_refused(task: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _config(**task)


def words_per_count(row: Row, text: str) -> float:
    return int(row["count"]) / len(text.split())


def test_a_task_that_takes_no_reward_is_scored_by_it_all_the_same() -> None:
    task = open_task(model.Task(kind="arithmetic", reward=f"{HERE}:words_per_count"))
    own = open_task(model.Task(kind="arithmetic"))
    row = task.rows("train")[0]
    assert (row, task.prompt(row)) == (own.rows("train")[0], own.prompt(row))
    assert task.score(row, Completion(text="c1 2 = 2", turns=())) == row["count"] / 4
    assert reward_digest(task) != reward_digest(own)


class Played(Environment):
    def reset(self, row: Row) -> str:
        return str(row["start"])

    def step(self, text: str) -> Observation:
        return Observation(text=text, done=True)

    def reward(self, text: str, turns: Sequence[str]) -> float:
        return 7.0


class Games(Task):
    def rows(self, split: Split) -> Sequence[Row]:
        return [{"start": 3}]

    def environment(self, row: Row) -> Environment:
        return Played()


def test_the_reward_of_an_environment_gives_way_to_another() -> None:
    task = open_task(model.Task(kind=f"{HERE}:Games", reward=(model.RewardUse(use="exact"),)))
    world = task.environment({"start": 3})
    assert world is not None
    assert (world.reset({"start": 3}), world.reward("3", ())) == ("3", None)
    assert world.step("x") == Observation(text="x", done=True)
    score = task.score({"start": 3, "answer": "3"}, Completion(text="3", turns=()))
    assert isinstance(score, Reward)
    assert score.value == 1.0
    assert not task.single_turn()
