"""Gymnasium environments as tasks: `gymnasium:FrozenLake-v1`.

    task.kind = "gymnasium:FrozenLake-v1"
    prompt       You are on: 0           (observation in the form of `options.first`)
    model        right                   environment   1
    model        ...

The reward is the sum of the steps' rewards. Invalid actions are reported to the model, cost
`options.mistake`, and end the episode after `options.max_mistakes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.adapters.episodes import (
    PromptFormat,
    SeededEpisode,
    SeededTask,
    packages_of,
    required,
)
from dora_pipe.producers.tasks.task import Environment, Observation, Prompt, Row
from dora_pipe.producers.tasks.values import observation_text
from dora_pipe.schemas.identity import derive_seed

FIRST: Final = "{observation}\n"
THEN: Final = "\n{observation}\n"


class GymnasiumTask(SeededTask):
    """Task `gymnasium:ID`."""

    def __init__(
        self,
        environment: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        actions: Sequence[str] = (),
        observe: str = "",
        act: str = "",
        first: str = FIRST,
        then: str = THEN,
        mistake: float = 0.0,
        max_mistakes: int = 2,
        seed: int = 1,
        count: int = 1024,
        eval_count: int = 64,
        chat: bool = False,
        system_prompt: str = "",
    ) -> None:
        """Options are in docs/environments.md.

        `environment` may start with a registering module (`ale_py:ALE/Pong-v5`). `observe` and
        `act` are `module:function`: (observation, info) to text, and text to action (ValueError for
        a mistake). Raises ConfigError.
        """
        kind = f"gymnasium:{environment}"
        super().__init__(
            name=kind,
            seed=seed,
            count=count,
            eval_count=eval_count,
            prompt_format=PromptFormat(chat=chat, system_prompt=system_prompt),
            observe=observe,
            act=act,
            max_mistakes=max_mistakes,
        )
        self._gymnasium = required("gymnasium", package="gymnasium", extra="gymnasium", kind=kind)
        from dora_pipe.producers.adapters import spaces  # needs the package

        self._spaces = spaces
        self._kind, self._id = kind, environment
        self._arguments = dict(arguments or {})
        self._actions = tuple(actions)
        for key, form in (("first", first), ("then", then)):
            _check_form(f"task.options.{key}", form)
        self.first, self.then = first, then
        self.mistake = mistake
        game = self.open()  # now, while the user's modules are importable
        self._packages = packages_of("gymnasium", type(game.unwrapped).__module__)
        drawn = getattr(game.spec, "nondeterministic", True)
        # Users' functions are opaque.
        self.replayable = not (drawn or self.observe or self.act)
        game.close()

    def open(self) -> Any:
        """Return a new environment. Raises ConfigError on failure."""
        try:
            return self._gymnasium.make(self._id, **self._arguments)
        except (self._gymnasium.error.Error, TypeError, ImportError) as error:
            registered = self._gymnasium.registry
            hint = None if self._id in registered else nearest(self._id, registered)
            raise ConfigError(f"task.kind: `{self._kind}`: {error}", hint=hint) from error

    def check(self) -> None:
        """Raise TaskError if observations or actions have no text form."""
        game = self.open()
        try:
            if problem := "" if self.observe else self._spaces.unsaid(game.observation_space):
                raise TaskError(
                    f"{self._kind}: an observation has no text form: {problem}",
                    hint="set task.options.observe to a function that returns text",
                )
            if problem := "" if self.act else self._spaces.unread(game.action_space):
                raise TaskError(
                    f"{self._kind}: {problem}",
                    hint="set task.options.act to a function that parses it",
                )
            self._check_names(game.action_space)
        finally:
            game.close()

    def environment(self, row: Row) -> Environment:
        return Game(self)

    def packages(self) -> Mapping[str, str]:
        return self._packages

    def reward_sources(self) -> Sequence[Any]:
        return (*super().reward_sources(), self._spaces.read)

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]] | Sequence[Row]:
        """Return conversations with random actions, which teach their format. Raises TaskError
        for text prompts and custom `act` functions."""
        if not self.prompt_format.chat or self.act:
            raise TaskError(
                f"{self._kind} makes demonstrations only with chat and built-in actions",
                hint="set task.chat = true and remove task.options.act",
            )
        drawn = (derive_seed(self._kind, "demonstrations", seed, index) for index in range(count))
        return [self._conversation(drawn_seed % 2**31) for drawn_seed in drawn]

    def describe(self, game: Any, observation: Any, info: Any) -> str:
        if self.observe is not None:
            return observation_text(self.observe(observation, info))
        return self._spaces.say(game.observation_space, observation)

    def read(self, game: Any, text: str) -> Any:
        """Return the action in a text. Raises ValueError, shown to the model, if there is none."""
        if self.act is not None:
            return self.act(text)
        return self._spaces.read(game.action_space, text, self._names(game.action_space))

    def form(self, game: Any, form: str, observation: str) -> str:
        actions = ", ".join(self._names(game.action_space))
        return form.replace("{observation}", observation).replace("{actions}", actions)

    def _names(self, space: Any) -> Sequence[str]:
        n = getattr(space, "n", None)
        discrete = type(space).__name__ == "Discrete"
        return self._actions if discrete and len(self._actions) == n else ()

    def _check_names(self, space: Any) -> None:
        names = self._actions
        if len({name.lower() for name in names}) < len(names):
            raise ConfigError("task.options.actions: a name appears twice")
        if names and not self.act and self._names(space) != names:
            raise ConfigError(f"task.options.actions: {len(names)} names for {space}")

    def _conversation(self, seed: int) -> Row:
        game, env = Game(self), self.open()
        try:
            env.action_space.seed(seed)
            messages: list[Any] = [*game.reset({"seed": seed})]
            done = False
            while not done and len(messages) < DEMONSTRATED_MAX:
                space = env.action_space
                turn = self._spaces.say(space, space.sample(), self._names(space))
                observation = game.step(turn)
                messages += [{"role": "assistant", "content": turn}, *observation.messages]
                done = observation.done
        finally:
            game.close()
            env.close()
        return {"messages": messages if messages[-1]["role"] == "assistant" else messages[:-1]}


DEMONSTRATED_MAX: Final = 16


class Game(SeededEpisode[GymnasiumTask]):
    """Episode of a Gymnasium environment."""

    _made: Any = None

    def reset(self, row: Row) -> Prompt:
        self._made = self.task.open()
        observation, info = self._made.reset(seed=row["seed"])
        text = self.task.describe(self._made, observation, info)
        return self.task.prompt_format.first(self.task.form(self._made, self.task.first, text))

    def step(self, text: str) -> Observation:
        task, game = self.task, self._made
        try:
            action = task.read(game, text)
        except ValueError as error:
            self.total += task.mistake
            return self.mistaken(task.form(game, task.then, f"error: {error}"))
        observation, reward, ended, cut, info = game.step(action)
        self.steps += 1
        self.total += float(reward)
        self.ended = bool(ended)
        if ended or cut:
            return Observation(done=True)
        return task.prompt_format.then(
            task.form(game, task.then, task.describe(game, observation, info))
        )

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def _check_form(key: str, form: str) -> None:
    if "{observation}" not in form:
        raise ConfigError(f"{key}: it has no {{observation}}")
