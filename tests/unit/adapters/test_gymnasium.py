"""Tests of Gymnasium environments as tasks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.adapters import episodes
from dora_pipe.producers.adapters.episodes import packages_of
from dora_pipe.producers.tasks.registry import open_task, reward_digest
from dora_pipe.producers.tasks.task import Task
from tests.support.adapters_of_others import opened, played, task_of

WAY = ("down", "down", "right", "right", "down", "right")
"""Path through FrozenLake's 4x4 without slipping."""

OWN = """
import gymnasium
from gymnasium import spaces


class Dice(gymnasium.Env):
    observation_space, action_space = spaces.Discrete(6), spaces.Text(8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return int(self.np_random.integers(6)), {"lucky": True}

    def step(self, action):
        return int(self.np_random.integers(6)), 0.5, action == "stop", False, {}


gymnasium.register(id="Dice-v0", entry_point=Dice)


def observe(observation, info):
    return f"die {observation} {info}"


def act(text):
    if text == "no":
        raise ValueError("say stop")
    return text
"""


def lake(*, chat: bool = False, **options: Any) -> Task:
    return task_of(
        "gymnasium:FrozenLake-v1",
        chat=chat,
        arguments={"is_slippery": False},
        actions=["left", "down", "right", "up"],
        **options,
    )


def test_the_way_over_the_ice_is_worth_one() -> None:
    task = lake()
    prompt, observed, reward = played(task, task.rows("train")[0], WAY)
    assert prompt == "0\n"
    assert [entry.text for entry in observed] == ["\n4\n", "\n8\n", "\n9\n", "\n10\n", "\n14\n", ""]
    assert [entry.done for entry in observed] == [False] * 5 + [True]
    assert (reward.value, reward.parts) == (1.0, {"steps": 6, "mistakes": 0, "ended": 1.0})


def test_a_turn_that_is_no_action_is_told_so_and_too_many_end_the_episode() -> None:
    task = lake(mistake=-0.1, max_mistakes=1)
    _, observed, reward = played(task, task.rows("train")[0], ("north", "south"))
    assert observed[0].text == "\nerror: an action is one of left, down, right, up\n"
    assert not observed[0].ok and not observed[0].done
    assert observed[1].done
    assert reward.value == pytest.approx(-0.2)


def test_a_conversation_has_messages_of_a_user() -> None:
    task = open_task(model.Task(kind="gymnasium:CartPole-v1", system_prompt="Balance."))
    prompt, observed, _ = played(task, {"seed": 3}, ("0",))
    assert prompt == [
        {"role": "system", "content": "Balance."},
        {"role": "user", "content": "-0.041 -0.026 0.030 0.008"},
    ]
    assert observed[0].messages == [{"role": "user", "content": "-0.042 -0.222 0.030 0.310"}]


def test_the_same_seed_and_turns_give_the_same_episode_beside_others() -> None:
    task = task_of("gymnasium:FrozenLake-v1")  # slippery by default
    row, way = task.rows("train")[5], "112212"
    alone = played(task, row, way)
    other, again = opened(task, row), opened(task, row)
    other.reset(task.rows("train")[6])
    observed = [again.reset(row)]
    for turn in way:
        other.step("0")
        observed.append(again.step(turn))  # type: ignore[arg-type]
    assert observed == [alone[0], *alone[1]]


def test_an_environment_of_ones_own_is_played_with_ones_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dice_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    observe, act = "dice_of_mine:observe", "dice_of_mine:act"
    task = task_of("gymnasium:dice_of_mine:Dice-v0", observe=observe, act=act)
    row = task.rows("eval")[0]
    turns = ("on", "no", "stop")
    prompt, observed, reward = played(task, row, turns)
    assert str(prompt).startswith("die ") and "lucky" in str(prompt)
    assert "error: say stop" in observed[1].text and observed[2].done
    assert reward.value == 1.0
    assert played(task, row, turns)[1] == observed
    assert set(task.packages()) == {"dice-of-mine", "gymnasium"}
    assert task.packages()["dice-of-mine"].startswith("- ")
    assert reward_digest(task) != reward_digest(task_of("gymnasium:dice_of_mine:Dice-v0"))


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("gymnasium:FrozenLake-v9", {}, "`v9` for environment `FrozenLake` doesn't exist"),
        ("gymnasium:FrozenLake-v1", {"arguments": {"slippery": 1}}, "slippery"),
        ("gymnasium:FrozenLake-v1", {"actions": ["a", "b"]}, "2 names for Discrete"),
        ("gymnasium:FrozenLake-v1", {"actions": ["a", "b", "A", "c"]}, "a name appears twice"),
        ("gymnasium:FrozenLake-v1", {"first": "go"}, "task.options.first: it has no {observation}"),
        ("gymnasium:FrozenLake-v1", {"count": 0}, "is not a number of rows"),
        ("gymnasium:FrozenLake-v1", {"sead": 1}, "task.options.sead"),
        ("gymnasium:", {}, "needs a name"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(
    kind: str, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        task_of(kind, **options)
    assert text in caught.value.message


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError) as caught:
        task_of("gymnasium:FrozenLake-v1")
    assert caught.value.message.endswith("gymnasium is not installed")
    assert caught.value.hint == "pip install -e '.[gymnasium]'"


def test_a_package_is_known_by_its_version_and_by_every_byte_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actual_packages = packages_of("gymnasium", "msgspec.json")
    assert set(actual_packages) == {"gymnasium", "msgspec"}
    assert all(len(package.split()) == 2 for package in actual_packages.values())
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "game_of_mine").mkdir()
    source = tmp_path / "game_of_mine" / "__init__.py"
    digests = set()
    for text in ("a = 1\n", "a = 2\n"):
        source.write_text(text)
        __import__("game_of_mine")
        episodes._source_digest.cache_clear()
        digests.add(packages_of("game_of_mine")["game-of-mine"])
    assert len(digests) == 2
