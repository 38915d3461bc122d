"""JSON form of values from users' code.

Types of numpy, pandas, pydantic, torch and polars are recognized by their methods. A value keeps
its meaning or is rejected.
"""

from __future__ import annotations

import dataclasses
import math
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AnySet
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any, Final

import msgspec

_METHODS: Final = ("model_dump", "to_dicts", "to_pylist", "tolist", "to_list", "_asdict", "to_dict")
"""Most trusted first."""

_INTEGER_MAX: Final = 2**63


class NoValue(TypeError):
    """The value has no plain form."""


def as_text(value: Any) -> str:
    """Return text unchanged, other values as JSON. Raises NoValue."""
    value = plain(value)
    if isinstance(value, Decimal):
        return str(value)
    value = _encodable(value)
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def escaped(value: Any) -> Any:
    """Return a plain value with lone surrogates escaped."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {escaped(key): escaped(item) for key, item in value.items()}
    return [escaped(item) for item in value] if isinstance(value, list | tuple) else value


def observation_text(value: Any) -> str:
    """Same as `as_text`, but raises NoValue for None."""
    if value is None:
        raise NoValue("the observation is None")
    return as_text(value)


def plain(value: Any) -> Any:
    """Return a value made of None, bool, int, float, Decimal, str, list and dict. Raises NoValue.

    Example: ``plain({"mean": numpy.float32(1.5)}) == {"mean": 1.5}``
    """
    match value:
        case Enum():
            return plain(value.value)
        case None | bool() | int() | float() | Decimal():
            return value
        case str():
            return str(value)
        case bytes() | bytearray() | memoryview():
            return _decoded(bytes(value))
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta() | uuid.UUID() | Fraction():
            return str(value)
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            return _table(value.items())
        case AnySet():
            return sorted(map(plain, value), key=lambda item: msgspec.json.encode(_encodable(item)))
        case msgspec.Struct():
            return plain(msgspec.structs.asdict(value))
    return _of_library(value)


def _of_library(value: Any) -> Any:
    kind = type(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if kind.__name__ == "NAType":  # pandas
        return None
    if getattr(getattr(value, "dtype", None), "kind", "") in ("m", "M") and hasattr(
        value, "astype"
    ):
        value = value.astype(str)  # `tolist` turns numpy's times into nanoseconds
    if hasattr(value, "reset_index"):
        return _of_pandas(value)
    for name in _METHODS:
        if callable(getattr(value, name, None)) and not isinstance(value, type):
            return plain(getattr(value, name)())
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    raise NoValue(f"{kind.__module__}.{kind.__qualname__} cannot be written as JSON")


def _of_pandas(value: Any) -> Any:
    """Return rows, a list or, for a series with an index, one row."""
    numbered = list(value.index) == list(range(len(value)))
    if not hasattr(value, "columns"):
        if numbered:
            return [plain(item) for item in value.tolist()]
        pairs = list(zip(value.index, value.tolist(), strict=True))
        return _table(pairs) if value.index.is_unique else plain(pairs)
    table = value if numbered else value.reset_index()
    names = list(table.columns)
    return [_table(zip(names, row, strict=True)) for row in table.itertuples(index=False)]


def _table(items: Iterable[tuple[Any, Any]]) -> dict[str, Any]:
    pairs = [(_key(key), plain(item)) for key, item in items]
    if len(dict(pairs)) < len(pairs):
        raise NoValue("a table with two keys of the same name cannot be written as JSON")
    return dict(pairs)


def _key(key: Any) -> str:
    name = plain(key)
    return name if isinstance(name, str) else as_text(name)


def _decoded(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise NoValue("bytes that are not UTF-8") from None


def _encodable(value: Any) -> Any:
    """Write numbers beyond the JSON encoder as digits."""
    match value:
        case dict():
            return {escaped(key): _encodable(item) for key, item in value.items()}
        case list():
            return [_encodable(item) for item in value]
        case str():
            return escaped(value)
        case float() if math.isfinite(value):
            return float(value)
        case float():
            return msgspec.Raw(_NOT_FINITE[repr(float(value))])
        case bool():
            return value
        case int() if -_INTEGER_MAX <= value < _INTEGER_MAX:
            return int(value)
        case int() | Decimal():
            return msgspec.Raw(str(value).encode())
    return value


_NOT_FINITE: Final = {"nan": b"NaN", "inf": b"Infinity", "-inf": b"-Infinity"}
