"""The right answers of a row, in whatever form its data have them.

A list means any of its items, a number equals all ways to write it, `true` and `false` are these
words. An object needs the name of the field that is meant; null, and what is none of these, is an
error: it would be compared as the text "None".
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, DecimalException
from typing import Any

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks.values import plain

Gold = str | Decimal


def right_answers(answer: Any, field: str = "") -> list[Gold]:
    """Return what is right, at least one: texts, and numbers.

    `field` names what counts of an object; dots go deeper. Raises TaskError.
    """
    value = plain(answer)
    items = value if isinstance(value, list) else [value]
    found = [gold for item in items for gold in _golds(item, field)]
    if not found:
        raise TaskError("the row's answer is an empty list")
    return found


def _golds(value: Any, field: str) -> list[Gold]:
    match value:
        case dict() if field:
            inner = _inner(value, field)
            return right_answers(inner) if isinstance(inner, list) else _golds(inner, "")
        case dict():
            raise TaskError(
                f"the row's answer is an object with {', '.join(map(repr, value)) or 'nothing'}:"
                " the reward's option `field` names which is the answer"
            )
        case str():
            return [value]
        case bool():
            return [str(value).lower(), str(value)]
        case int() | float() | Decimal():
            return [Decimal(str(value))]
        case None:
            raise TaskError("the row's answer is null; task.filter leaves such rows out")
    raise TaskError(f"the row's answer has a {type(value).__name__} in a list")


def _inner(value: Mapping[str, Any], field: str) -> Any:
    inner: Any = value
    for name in field.split("."):
        if not isinstance(inner, Mapping) or name not in inner:
            raise TaskError(f"the row's answer has no `{field}`")
        inner = inner[name]
    return inner


def is_right(text: str, gold: Gold) -> bool:
    """Compare a text with a right answer: numbers by value, other answers letter for letter."""
    if isinstance(gold, str):
        return text == gold
    try:
        return Decimal(text) == gold
    except DecimalException:
        return False
