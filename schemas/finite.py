"""Which numbers records may hold: finite ones, and rewards within a bound.

msgspec would write a NaN or an infinity as null, and no reader takes that. Only fields whose type
can hold a float are walked, so a record without any costs one look-up.
"""

from __future__ import annotations

import functools
import math
import typing
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import SchemaError

REWARD_MAX: Final = 1e6
"""Largest absolute value of a reward that a task may give.

Within it nothing that is made of rewards overflows: an advantage is a difference of two of them,
2e6 at most, or that divided by their standard deviation; its square is 4e12, the sum of those over
a batch of 1e9 trajectories is 4e21, and float32, in which losses and gradients are computed, ends
at 3e38. That bound is the task's: readers take every finite reward, since older logs hold some
beyond it, and a trainer says of a batch that overflows that it is `NonFinite`.
"""


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
