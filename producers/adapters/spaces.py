"""Text forms of observations and actions of Gymnasium spaces.

space           text form
Discrete        number; for actions also the name
Text            the text itself
MultiDiscrete,  numbers separated by spaces, row by row; floats rounded
MultiBinary,    to three decimal places
Box
Tuple           parts separated by spaces; observations only
Dict            one line per part, `name: part`; observations only
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import spaces

NUMBERS_MAX: Final = 256
"""Maximum numbers of an observation; larger ones are images."""

_NUMBER: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_READ: Final = (
    *(spaces.Discrete, spaces.Text),
    *(spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary),
)


class NotRead(ValueError):
    """Text without a valid action; the message is for the model."""


def unsaid(space: gymnasium.Space[Any]) -> str:
    """Return why observations of a space have no text form; empty if they have one."""
    match space:
        case spaces.Discrete() | spaces.Text():
            return ""
        case spaces.Tuple():
            return next(filter(None, map(unsaid, space.spaces)), "")
        case spaces.Dict():
            return next(filter(None, map(unsaid, space.spaces.values())), "")
        case spaces.Box() | spaces.MultiDiscrete() | spaces.MultiBinary():
            size = int(np.prod(space.shape))
            return "" if size <= NUMBERS_MAX else f"{size} numbers have no text form"
        case _:
            return f"{type(space).__name__} has no text"


def unread(space: gymnasium.Space[Any]) -> str:
    """Return why actions of a space have no text form; empty if they have one."""
    if isinstance(space, _READ):
        return unsaid(space)
    return f"actions of {type(space).__name__} cannot be read"


def say(space: gymnasium.Space[Any], value: Any, names: Sequence[str] = ()) -> str:
    """Return a value of a space as text; `names` are those of a Discrete space's values, in
    order."""
    match space:
        case spaces.Discrete() if names:
            return names[int(value) - int(space.start)]
        case spaces.Discrete():
            return str(int(value))
        case spaces.Tuple():
            parts = zip(space.spaces, value, strict=True)
            return " ".join(say(part, element) for part, element in parts)
        case spaces.Dict():
            named = space.spaces.items()
            return "\n".join(f"{name}: {say(part, value[name])}" for name, part in named)
        case spaces.Text():
            return str(value)
        case _:
            return " ".join(map(_number, np.asarray(value).ravel().tolist()))


def _number(value: float) -> str:
    if isinstance(value, float):
        text = f"{value:.3f}"
        return text if float(text) else text.removeprefix("-")  # no negative zero
    return str(int(value))


def read(space: gymnasium.Space[Any], text: str, names: Sequence[str] = ()) -> Any:
    """Return the action in a text: the last value for Discrete, the stripped text for Text, else
    the required count of numbers. Raises NotRead."""
    match space:
        case spaces.Discrete():
            return _chosen(space, text, names)
        case spaces.Text():
            action: Any = text.strip()
        case _:
            action = _numbers(space, text)
    if not space.contains(action):
        raise NotRead(f"{text.strip()!r} is not within {space}")
    return action


def _chosen(space: spaces.Discrete, text: str, names: Sequence[str]) -> int:
    actions = names or [str(int(space.start) + index) for index in range(int(space.n))]
    longest_first = sorted(map(re.escape, actions), key=len, reverse=True)
    named = re.findall(rf"(?<!\w)(?:{'|'.join(longest_first)})(?!\w)", text, re.IGNORECASE)
    if not named:
        raise NotRead(f"an action is one of {', '.join(actions)}")
    lowered = [name.lower() for name in actions]
    return int(space.start) + lowered.index(named[-1].lower())


def _numbers(space: gymnasium.Space[Any], text: str) -> Any:
    shape, size = space.shape or (), int(np.prod(space.shape or ()))
    numbers = _NUMBER.findall(text)
    if len(numbers) != size:
        raise NotRead(f"an action has {size} numbers, not {len(numbers)}")
    given = np.array([float(number) for number in numbers])
    with np.errstate(all="ignore"):
        action = given.astype(space.dtype).reshape(shape)
    if np.issubdtype(action.dtype, np.integer) and not np.array_equal(action.ravel(), given):
        raise NotRead(f"an action has whole numbers, not {text.strip()!r}")
    return action
