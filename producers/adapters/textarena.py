"""Games of TextArena as tasks: `textarena:GuessTheNumber-v0`. It decides what of a game the model
is told (what is new since its last turn, but its own words), and who plays the other seats.

    task.kind = "textarena:GuessTheNumber-v0"
    prompt       [GAME] You are Player 0. You are playing Guess The Number. ...
    model        [7]                     environment   [GAME] The target number is higher.
    model        ...

The reward is the game's own for the model's seat; a game that is cut off has `options.unfinished`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.own_code import load_function, nearest
from dora_pipe.producers.adapters.episodes import PromptFormat, SeededRandom, SeededTask
from dora_pipe.producers.adapters.packages import packages_of, required
from dora_pipe.producers.tasks.port import Environment, Observation, Prompt, Reward, Row

Opponent = Callable[[str], str]
"""Gets all that its seat has been told so far, gives what it says."""


class TextArenaTask(SeededTask):
    """The task `textarena:ID`.

    Example: ``TextArenaTask("GuessTheNumber-v0", arguments={"max_number": 9})``.
    """

    def __init__(
        self,
        game: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        opponent: str = "",
        players: int = 0,
        seat: int = 0,
        unfinished: float = 0.0,
        seed: int = 1,
        count: int = 1024,
        eval_count: int = 64,
        chat: bool = False,
        system_prompt: str = "",
    ) -> None:
        """Options of the task; docs/environments.md has them all.

        `opponent`: `module:function` that plays the other seats. `players`: 0: 1, or 2 with an
        opponent. Raises ConfigError where textarena is not installed, and for games that cannot be
        played so.
        """
        kind = f"textarena:{game}"
        super().__init__(
            name=kind,
            seed=seed,
            count=count,
            eval_count=eval_count,
            prompt_format=PromptFormat(chat=chat, system_prompt=system_prompt),
        )
        self.package = required("textarena", package="textarena", extra="textarena", kind=kind)
        known = self.package.envs.registration.ENV_REGISTRY
        if game not in known:
            raise ConfigError(
                f"task.kind: `{kind}`: textarena has no `{game}`", hint=nearest(game, known)
            )
        self.kind, self._game, self._arguments = kind, game, dict(arguments or {})
        self.players = players or (2 if opponent else 1)
        self.seat, self.unfinished = seat, unfinished
        if not 0 <= seat < self.players:
            raise ConfigError(f"task.options.seat: {seat} is none of {self.players}")
        if self.players > 1 and not opponent:
            raise ConfigError(
                f"task.options.opponent: who plays the other seats of `{kind}`?",
                hint='for instance "mine:player"',
            )
        self.opponent: Opponent | None = None
        if opponent:
            self.opponent = load_function("task.options.opponent", opponent, TaskError)
        self.replayable = self.players == 1

    def open(self) -> Any:
        """A game of the package. Raises ConfigError for arguments that it does not take."""
        try:
            return self.package.make(self._game, **self._arguments)
        except TypeError as error:
            raise ConfigError(f"task.options.arguments: `{self.kind}`: {error}") from error
        except (ImportError, SyntaxError, ValueError) as error:  # needs another package, or Python
            raise TaskError(f"`{self.kind}` cannot be made here: {error}") from error

    def check(self) -> None:
        """Begins a game. Raises ConfigError where it is for another number of players, TaskError
        where it lacks something here."""
        game = Game(self)
        try:
            game.reset({"seed": 0})
        except AssertionError as error:
            hint = "task.options.players, and task.options.opponent for the other seats"
            raise ConfigError(f"`{self.kind}`: {error}", hint=hint) from error
        except (LookupError, OSError, ValueError) as error:  # word lists, keys
            said = " ".join(re.findall(r"[^\s*]+", str(error)))
            raise TaskError(
                f"`{self.kind}` cannot begin: {said or type(error).__name__}"
            ) from error

    def environment(self, row: Row) -> Environment:
        return Game(self)

    def packages(self) -> Mapping[str, str]:
        return packages_of("textarena")

    def reward_sources(self) -> Sequence[Any]:
        own = () if self.opponent is None else (self.opponent,)
        return (*super().reward_sources(), *own)


class Game(Environment):
    """One episode."""

    def __init__(self, task: TextArenaTask) -> None:
        self._task = task
        self._heard: dict[int, list[str]] = {}
        self._turns, self._done = 0, False

    def reset(self, row: Row) -> Prompt:
        self._random = SeededRandom(row["seed"])
        with self._random:
            self._game = self._task.open()
            self._game.reset(num_players=self._task.players, seed=row["seed"])
        self._play_others()
        return self._task.prompt_format.first(self._news())

    def step(self, text: str) -> Observation:
        self._turns += 1
        self._say(text)
        self._play_others()
        return Observation(done=True) if self._done else self._task.prompt_format.then(self._news())

    def reward(self, text: str, turns: Sequence[str]) -> Reward:
        """The game's own, once it is over; parts count."""
        parts = {"turns": float(self._turns), "finished": float(self._done)}
        if not self._done:
            return Reward(value=self._task.unfinished, parts=parts)
        rewards, info = self._game.close()
        seat = self._task.seat
        parts["invalid"] = float(bool(info[seat].get("invalid_move")))
        return Reward(value=float(rewards[seat]), parts=parts)

    def _play_others(self) -> None:
        """Until it is the model's turn, or the game is over."""
        while not self._done:
            player, said = self._listen()
            self._heard.setdefault(player, []).extend(said)
            if player == self._task.seat:
                return
            assert self._task.opponent is not None
            turn = self._task.opponent("\n".join(self._heard[player]))
            if not isinstance(turn, str):
                raise TypeError(f"the opponent said {type(turn).__name__}, not text")
            self._say(turn)

    def _say(self, turn: str) -> None:
        with self._random:
            self._done, _ = self._game.step(action=turn)

    def _listen(self) -> tuple[int, list[str]]:
        """Whose turn it is, and what that seat has not been told yet, but its own words."""
        kinds = self._task.package.ObservationType
        inner = self._game
        while isinstance(inner, self._task.package.Wrapper):
            inner = inner.env  # wrappers tell the whole game anew at every turn
        player, seen = inner.get_observation()
        names = inner.state.role_mapping
        return player, [
            f"[{names.get(sender, f'Player {sender}')}] {message}"
            for sender, message, kind in seen
            if not (kind is kinds.PLAYER_ACTION and sender == player)
        ]

    def _news(self) -> str:
        news = self._heard.pop(self._task.seat, [])
        return "\n".join((*([""] if self._turns else []), *news, ""))
