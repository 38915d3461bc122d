"""Finds a NaN or an infinity in a record: msgspec would write it as null, and no reader takes that.

Only fields whose type can hold a float are walked, so a record without any costs one look-up.
"""

from __future__ import annotations

import functools
import math
import typing
from typing import Any

import msgspec

from dora_pipe.errors import SchemaError


def refuse_non_finite(value: Any, path: str = "$") -> None:
    """Raise SchemaError naming the first number inside `value` that is not finite."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SchemaError(f"{value} is not a finite number", path=path)
    elif isinstance(value, msgspec.Struct):
        for name in float_fields(type(value)):
            refuse_non_finite(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for key, one in value.items():
            refuse_non_finite(one, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(value):
            refuse_non_finite(one, f"{path}[{place}]")


@functools.cache
def float_fields(record: type[msgspec.Struct]) -> tuple[str, ...]:
    """Names of a record's fields that can hold a float, at whatever depth."""
    return tuple(
        field.name for field in msgspec.structs.fields(record) if _may_hold_float(field.type)
    )


def _may_hold_float(kind: Any) -> bool:
    if kind is float or kind is Any:
        return True
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return bool(float_fields(kind))
    if typing.get_origin(kind) is typing.Literal:
        return False
    return any(_may_hold_float(part) for part in typing.get_args(kind))
