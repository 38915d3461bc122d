"""Correct answers of a row, in the forms of data sets.

A list allows any of its items; a number equals all its notations; an object needs a field name.
Null is an error: it would compare as the text "None".
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, DecimalException
from typing import Any

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks.values import plain

Gold = str | Decimal


def right_answers(answer: Any, field: str = "") -> list[Gold]:
    """Return at least one correct answer, as text or number.

    `field` selects a field of an object; dots select nested fields. Raises TaskError.
    """
    value = plain(answer)
    items = value if isinstance(value, list) else [value]
    golds = [gold for item in items for gold in _golds(item, field)]
    if not golds:
        raise TaskError("the row's answer is an empty list")
    return golds


def _golds(value: Any, field: str) -> list[Gold]:
    match value:
        case dict() if field:
            inner = _inner(value, field)
            return right_answers(inner) if isinstance(inner, list) else _golds(inner, "")
        case dict():
            raise TaskError(
                f"the row's answer is an object with {', '.join(map(repr, value)) or 'nothing'}:"
                " set the reward's option `field`"
            )
        case str():
            return [value]
        case bool():
            return [str(value).lower(), str(value)]
        case int() | float() | Decimal():
            return [Decimal(str(value))]
        case None:
            raise TaskError("the row's answer is null; drop such rows with task.filter")
    raise TaskError(f"the row's answer has a {type(value).__name__} in a list")


def _inner(value: Mapping[str, Any], field: str) -> Any:
    inner: Any = value
    for name in field.split("."):
        if not isinstance(inner, Mapping) or name not in inner:
            raise TaskError(f"the row's answer has no `{field}`")
        inner = inner[name]
    return inner


def is_right(text: str, gold: Gold) -> bool:
    """Compare a text with a correct answer: numbers by value, others character by character."""
    if isinstance(gold, str):
        return text == gold
    try:
        return Decimal(text) == gold
    except DecimalException:
        return False
