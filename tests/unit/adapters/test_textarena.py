"""Games of TextArena as tasks; `make test-adapters` runs them where the package is not in .venv."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.tasks.registry import reward_digest
from tests.support.adapters_of_others import opened, played, task_of
from tests.support.tidy import ROOT

pytest.importorskip("textarena", reason="textarena is not here: make test-adapters")

GUESS = "textarena:GuessTheNumber-v0"


def bisected(kind: str = GUESS, at: int = 0) -> tuple[list[str], Any]:
    """What a bisection is told, and its reward."""
    task = task_of(kind)
    row = task.rows("train")[at]
    world = opened(task, row)
    told = [str(world.reset(row))]
    low, high, done = 1, 20, False
    while not done:
        middle = (low + high) // 2
        seen = world.step(f"I say [{middle}].")
        done = seen.done
        told.append(seen.text)
        low, high = (middle + 1, high) if "higher" in seen.text else (low, middle - 1)
    return told, world.reward("", [])


def test_a_game_is_won_by_who_plays_it_well() -> None:
    told, reward = bisected()
    assert told[0].startswith("[GAME] You are Player 0. You are playing Guess The Number.")
    assert set(told[1:-1]) <= {
        "\n[GAME] The target number is higher.\n",
        "\n[GAME] The target number is lower.\n",
    }
    assert reward.value == 1.0
    assert reward.parts == {"turns": len(told) - 1, "finished": 1.0, "invalid": 0.0}


def test_a_seed_is_a_game_whatever_is_played_beside_it() -> None:
    before = random.getstate()
    games = [bisected(at=at) for at in range(4)]
    assert games == [bisected(at=at) for at in range(4)]
    assert len({len(told) for told, _ in games}) > 1
    assert random.getstate() == before
    task = task_of("textarena:2048-v0", chat=True)
    row = task.rows("eval")[0]
    alone = played(task, row, ["[left]", "[up]"])
    one, other = opened(task, row), opened(task, row)
    seen = [one.reset(row)]
    for turn in ("[left]", "[up]"):
        other.reset(task.rows("eval")[1])
        seen.append(one.step(turn))  # type: ignore[arg-type]
    assert seen == [alone[0], *alone[1]]


def test_a_game_that_is_cut_off_has_the_reward_of_the_options() -> None:
    task = task_of(GUESS, unfinished=-0.5)
    _, seen, reward = played(task, task.rows("train")[0], ["no number"])
    assert "invalid move" in seen[0].text
    assert (reward.value, reward.parts) == (-0.5, {"turns": 1.0, "finished": 0.0})


def test_a_function_plays_the_other_seat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    (block,) = [
        one for one in re.findall(r"```python\n(.*?)```", page, re.S) if "def player" in one
    ]
    (tmp_path / "player_of_mine.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    opponent = "player_of_mine:player"
    task = task_of("textarena:TicTacToe-v0", opponent=opponent)
    row = task.rows("train")[0]
    prompt, seen, _ = played(task, row, ["[4]"])
    assert "Available Moves" in str(prompt)
    assert seen[0].text.count("[Player 1] [") == 1
    assert "[Player 0]" not in seen[0].text, "its own words are not told again"
    second = task_of("textarena:TicTacToe-v0", opponent=opponent, seat=1)
    assert str(played(second, row, [])[0]).count("[Player 0] [") == 1
    assert reward_digest(task) != reward_digest(task_of(GUESS))
    assert set(task.packages()) == {"textarena"}


@pytest.mark.parametrize(
    ("kind", "options", "error", "said"),
    [
        ("textarena:Chess-v9", {}, ConfigError, "textarena has no `Chess-v9`"),
        (GUESS, {"arguments": {"largest": 3}}, ConfigError, "largest"),
        (GUESS, {"seat": 1}, ConfigError, "task.options.seat: 1 is none of 1"),
        (GUESS, {"players": 2}, ConfigError, "who plays the other seats"),
        ("textarena:TicTacToe-v0", {}, ConfigError, "number of players has to be 2"),
        ("textarena:Debate-v0", {}, TaskError, "OPENROUTER_API_KEY"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(
    kind: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=re.escape(said)):
        task_of(kind, **options)
