"""What a reward function is given: decides it by the names of its parameters; and what those that
come with the package are made of.

`row`, `text`, `turns`, `messages`, `completion` and `answer` are of the trajectory; a function that
names `rows`, `texts`, `answers` or `completions` is asked of several at once (`batches`). What has
another name is an option. Two parameters with other names are called by place, with the row and
the text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.own_code import nearest
from dora_pipe.producers.rewards.batches import Batches
from dora_pipe.producers.tasks.port import Completion, Row

KNOWN: Final = ("row", "text", "turns", "messages", "completion", "answer")
"""Of the trajectory: its row, the last turn's text, all segments' texts, the conversation, all of
this at once, and the row's answer."""

LISTS: Final = {
    "rows": "row",
    "texts": "text",
    "answers": "answer",
    "completions": "completion",
}
"""The same of several trajectories, as lists of one length."""

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """What a reward may know of where it is asked. Example: ``RewardContext(limit_s=10.0)``."""

    directory: str = ""
    """Where relative paths in its options begin: `task.directory`."""
    limit_s: float = 10.0
    """`task.reward_timeout_s`: nobody waits longer."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the options of a reward that comes with the package."""

    def open(self, where: str, context: RewardContext) -> Function:
        """The function, called by the names of its parameters. `where` names it in messages.

        Raises ConfigError.
        """
        raise NotImplementedError

    def digested(self, where: str, context: RewardContext) -> tuple[str, ...]:
        """What decides the score and stands elsewhere. Raises ConfigError where it is not there."""
        return ()


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A function with its options, and what it wants of a trajectory.

    Example: ``Bound(function=brevity, takes=("text",), options={"words": 50})``.
    """

    function: Function
    takes: tuple[str, ...] | None
    """Names of `KNOWN` or of `LISTS`; None: row and text, by place."""
    options: Mapping[str, Any]
    batches: Batches | None = None

    def __call__(self, row: Row, completion: Completion, answer_column: str) -> Any:
        """What the function gives. Raises what it raises, TaskError for a row without an answer."""
        if self.takes is None:
            return self.function(row, completion.text)
        given = {
            name: _given(LISTS.get(name, name), row, completion, answer_column)
            for name in self.takes
        }
        if self.batches is not None:
            return self.batches.ask(given)
        return self.function(**given, **self.options)


def _given(name: str, row: Row, completion: Completion, answer_column: str) -> Any:
    match name:
        case "row":
            return row
        case "completion":
            return completion
        case "answer":
            if answer_column not in row:
                raise TaskError(f"the row has no column `{answer_column}` for its answer")
            return row[answer_column]
        case _:
            return getattr(completion, name)


def bind(where: str, function: Function, options: Mapping[str, Any], *, older: bool) -> Bound:
    """Decide what `function` is given. `where` names it in messages.

    With `older`, that of the key `task.reward`, a first parameter `row` and any second one are
    called by place, as they ever were. Raises ConfigError where a parameter is no name of `KNOWN`
    and no option, or an option is none of its parameters.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # Some functions in C have none.
        return Bound(function=function, takes=None, options={})
    if not options and _is_of_two(parameters, older=older):
        return Bound(function=function, takes=None, options={})
    named = {name: one for name, one in parameters.items() if one.kind in _NAMED}
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    lists = any(name in named for name in LISTS)
    known = tuple(LISTS) if lists else KNOWN
    takes = tuple(name for name in known if name in named and name not in options)
    for name in options:
        if name not in named and not anything:
            raise ConfigError(
                f"{where} takes no option `{name}`",
                hint=nearest(name, [one for one in named if one not in known]),
            )
    for name, one in parameters.items():
        optional = one.default is not one.empty or one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        if name not in takes and name not in options and not optional:
            raise ConfigError(
                f"{where} has a parameter `{name}`, which is neither of a trajectory nor an option",
                hint=nearest(name, known) or f"of a trajectory are {', '.join(known)}",
            )
    batches = Batches(function, options) if lists else None
    return Bound(function=function, takes=takes, options=dict(options), batches=batches)


def _is_of_two(parameters: Mapping[str, inspect.Parameter], *, older: bool) -> bool:
    """Whether these are called by place with row and text: ``score(sample, output)``."""
    needed = [one for one in parameters.values() if one.default is one.empty]
    placed = [one.name for one in needed if one.kind in _BY_PLACE]
    if any(one.kind is one.VAR_POSITIONAL for one in needed):
        return len(placed) <= 2
    if len(needed) != 2 or len(placed) != 2:
        return False
    if older and placed[0] == "row":
        return True
    if placed[0] in LISTS or placed[1] in LISTS:
        return False
    return placed[0] not in KNOWN or (placed[0] == "row" and placed[1] not in KNOWN)
