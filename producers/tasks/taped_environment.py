"""An environment that its cassette answers as far as it goes: decides what is asked of the cassette
and what of the real one.

The real one is opened when the cassette has no answer, and not before. It is told then what the
cassette has answered until there, and must answer the same.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import msgspec

from dora_pipe.producers.tasks.answers import observed, prompted, scored
from dora_pipe.producers.tasks.background import call_user_code
from dora_pipe.producers.tasks.cassette import (
    LOGGED_REWARD,
    RESET,
    REWARD,
    Answer,
    Call,
    CassetteDiffers,
    step_of,
)
from dora_pipe.producers.tasks.other_reward import OtherReward
from dora_pipe.producers.tasks.port import (
    Environment,
    Observation,
    Prompt,
    Reward,
    Row,
    Task,
    Turn,
)
from dora_pipe.producers.tasks.tape import NOTHING, AskedCall, EpisodeTape, raise_recorded

_RESET: Final[Call] = {"kind": RESET}


class TapedEnvironment(Environment):
    """An episode that its cassette answers as far as it goes."""

    def __init__(
        self,
        tape: EpisodeTape,
        task: Task,
        row: Row,
        *,
        begun: Answer | None,
        real: Environment | None,
    ) -> None:
        """`begun`: what its cassette has of its beginning; else `real`, which is open."""
        self._tape, self._task, self._row = tape, task, row
        self._real = real
        self._begun = begun
        self._told: list[tuple[Turn, Answer]] = []

    def reset(self, row: Row) -> Any:
        if self._begun is None:
            return self._reset()
        self._tape.add(_RESET, self._begun)
        return _prompt_of(self._begun)

    async def _reset(self) -> Any:
        assert self._real is not None, "opened where the cassette has no beginning"
        reset = partial(self._real.reset, self._row)
        found, self._begun = await self._asked(self._tape.ask(_RESET), reset, _prompt_answer)
        self._tape.add(_RESET, self._begun)
        return found

    def respond(self, turn: Turn) -> Observation | Awaitable[Observation]:
        """See Environment. Raises CassetteMiss, RaisedThere for what it raised when it was
        recorded."""
        asked = self._tape.ask(step_of(turn))
        found = self._tape.find(asked)
        if found is None:
            return self._step(turn, asked)
        self._goes_on(turn, asked.call, found, given=True)
        return _observation_of(found)

    async def _step(self, turn: Turn, asked: AskedCall) -> Observation:
        real = await self._opened()
        seen, answer = await self._asked(asked, partial(real.respond, turn), _step_answer)
        self._goes_on(turn, asked.call, answer, given=False)
        return cast(Observation, seen)

    def _goes_on(self, turn: Turn, call: Call, answer: Answer, *, given: bool) -> None:
        self._told.append((turn, answer))
        self._tape.add(call, answer)
        self._tape.end_turn(given=given)

    def reward(self, text: str, turns: Sequence[str]) -> Any:
        """See Environment. Of a run's log it is the environment's where the task has none."""
        call = {"kind": REWARD, "text": text}
        if self._real is None and self._tape.has(call) is None:
            logged = self._tape.has({"kind": LOGGED_REWARD, "text": text})
            if logged is not None:
                return None if has_reward(self._task) else _reward_of(logged)
        asked = self._tape.ask(call)
        found = self._tape.find(asked)
        return self._score(asked, text, turns) if found is None else _reward_of(found)

    async def _score(self, asked: AskedCall, text: str, turns: Sequence[str]) -> Any:
        real = await self._opened()
        return (await self._asked(asked, partial(real.reward, text, turns), _reward_answer))[0]

    async def close(self) -> None:  # type: ignore[override]
        """See Environment: nothing was opened where the cassette had everything."""
        if self._real is not None:
            await call_user_code(self._real.close)

    async def _asked(
        self, asked: AskedCall, function: Callable[[], Any], answer_of: Callable[[Any], Answer]
    ) -> tuple[Any, Answer]:
        """What the real one gives, recorded. What it raises is an answer, too, unless it says that
        something outside has failed."""
        with self._tape.asking(asked) as real:
            found = await call_user_code(function)
            answer = answer_of(found)
        real.answered(answer)
        return found, answer

    async def _opened(self) -> Environment:
        """The real one, where the episode is. Raises CassetteDiffers."""
        if self._real is None:
            real = await call_user_code(self._task.environment, dict(self._row))
            if real is None:
                raise CassetteDiffers("the row has no environment any more")
            try:
                await self._tell(real)
                self._real = real
            finally:
                if self._real is None:
                    await call_user_code(real.close)
        return self._real

    async def _tell(self, real: Environment) -> None:
        prompt = await call_user_code(real.reset, dict(self._row))
        if _prompt_answer(prompt) != self._begun:
            raise CassetteDiffers("the episode begins otherwise than on the cassette")
        for at, (turn, answer) in enumerate(self._told):
            if _step_answer(await call_user_code(real.respond, turn)) != answer:
                raise CassetteDiffers(f"turn {at} is answered otherwise than on the cassette")


async def open_taped(task: Task, row: Row, tape: EpisodeTape) -> Environment | None:
    """The environment of a row, opened where the cassette does not have its beginning."""
    if not has_environment(task):
        return None
    asked = tape.ask(_RESET)
    found = tape.find(asked)
    if found is not None:
        none = found == NOTHING
        return None if none else TapedEnvironment(tape, task, row, begun=found, real=None)
    real = await call_user_code(task.environment, row)
    if real is None:
        tape.record(asked, NOTHING, 0.0)
        return None
    return TapedEnvironment(tape, task, row, begun=None, real=real)


def has_environment(task: Task) -> bool:
    """Whether some of its rows may have one of their own."""
    return type(_inner(task)).environment is not Task.environment


def has_reward(task: Task) -> bool:
    """Whether it scores itself what its environments do not."""
    kind = type(_inner(task))
    return isinstance(task, OtherReward) or not (
        kind.reward is Task.reward and kind.score is Task.score
    )


def _inner(task: Task) -> Task:
    while isinstance(task, OtherReward):
        task = task.inner
    return task


# Answers as they are recorded


def _prompt_answer(prompt: Any) -> Answer:
    """Raises NoAnswer for what is no prompt."""
    ready = prompted("", prompt, ())
    return {"messages": list(ready.messages)} if ready.messages else {"text": ready.text}


def _prompt_of(answer: Answer) -> Prompt:
    raise_recorded(answer)
    return cast(Prompt, answer["messages"] if "messages" in answer else answer["text"])


def step_answer(
    text: str, messages: Sequence[Mapping[str, Any]], *, done: bool, tool: str, ok: bool
) -> dict[str, Any]:
    """What an environment has answered to a turn, as it is recorded."""
    said = {"messages": list(messages)} if messages else {"text": text}
    return {**said, "done": done, **({"tool": tool} if tool else {}), **({} if ok else {"ok": ok})}


def _step_answer(seen: Any) -> Answer:
    """Raises NoAnswer for what is no observation."""
    event = observed("", seen)
    return step_answer(event.text, event.messages, done=event.done, tool=event.tool, ok=event.ok)


def _observation_of(answer: Answer) -> Observation:
    raise_recorded(answer)
    return Observation(
        text=answer.get("text", ""),
        done=answer["done"],
        messages=answer.get("messages", ()),
        tool=answer.get("tool", ""),
        ok=answer.get("ok", True),
    )


def reward_answer(
    value: float, raw: float | None, parts: Mapping[str, float], answer: str
) -> dict[str, Any]:
    """A reward, as it is recorded."""
    return {"value": value, "raw": raw, "parts": dict(parts), "answer": answer}


def _reward_answer(found: Any) -> Answer:
    """Raises NoAnswer for what is no reward."""
    if found is None:
        return NOTHING
    event = scored("", found)
    return reward_answer(event.reward, event.raw, event.parts, event.answer)


def _reward_of(answer: Answer) -> Reward | None:
    raise_recorded(answer)
    return None if answer == NOTHING else msgspec.convert(dict(answer), Reward)
