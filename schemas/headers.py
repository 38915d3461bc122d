"""Headers of a trajectory, for filtering without decoding the value.

Names are the fields of `Headers`, from the trajectory or its `Meta`; values are ASCII, empty for an
invalid reward. Unknown names are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.trajectory import Described, Headers, Meta, Trajectory
from dora_pipe.schemas.wire import DIGEST

_TEXT_CHARACTERS_MAX = 500
_DIGESTS = {"digest": re.compile("[0-9a-f]{64}"), "sha256": DIGEST}
_INTEGER = re.compile("-?(?:0|[1-9][0-9]{0,18})")


def describe(trajectory: Trajectory, *, sha256: str, traceparent: str = "") -> Headers:
    """Return the headers of a trajectory; `sha256` is that of its value bytes."""
    fields = dict(zip(_COMPARED_NAMES, _SAID_BY(trajectory), strict=True))
    return Headers(**fields, sha256=sha256, traceparent=traceparent)


def header_pairs(headers: Headers) -> tuple[tuple[str, bytes], ...]:
    """Return headers for the bus. Raises SchemaError if not ASCII."""
    return tuple((name, _write(name, getattr(headers, name))) for name in _ORDER)


def parse_headers(raw: Iterable[tuple[str, bytes]]) -> Headers:
    """Parse headers from the bus. Raises SchemaError for missing, duplicate or invalid ones."""
    values: dict[str, bytes] = {}
    for name, value in raw:
        if name in values and name in _NAMES:
            raise SchemaError("header is there twice", path=_path(name))
        values[name] = value
    parsed: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        if name in values:
            parsed[name] = _parse(name, kind, values[name])
        elif name not in _OPTIONAL:
            raise SchemaError("header is missing", path=_path(name))
    return Headers(**parsed)


def _parse(name: str, kind: str, value: bytes) -> Any:
    if not value.isascii() or len(value) > _TEXT_CHARACTERS_MAX:
        raise SchemaError("not ASCII, or too long", path=_path(name))
    text = value.decode()
    if kind == "int" and _INTEGER.fullmatch(text) is None:
        raise SchemaError(f"not an integer: {text[:60]!r}", path=_path(name))
    if name in _DIGESTS and _DIGESTS[name].fullmatch(text) is None:
        raise SchemaError("not 64 hex digits", path=_path(name))
    try:
        return _READ[kind](text)
    except ValueError:
        raise SchemaError(f"not a finite number: {text[:60]!r}", path=_path(name)) from None


def matches(headers: Headers, trajectory: Described) -> list[str]:
    """Return the header fields that differ from the trajectory.

    Ignores `sha256`, which covers the bytes, and `traceparent`.
    """
    expected, actual = _SAID_BY(trajectory), _COMPARED(headers)
    if expected == actual:
        return []
    return [
        name
        for name, value, other in zip(_COMPARED_NAMES, expected, actual, strict=True)
        if value != other
    ]


def _path(name: str) -> str:
    return f"$.headers.{name}"


def _write(name: str, value: str | int | float | None) -> bytes:
    text = "" if value is None else repr(value) if isinstance(value, float) else str(value)
    if not text.isascii():
        raise SchemaError(f"not ASCII: {text[:60]!a}", path=_path(name))
    return text.encode()


def _finite(text: str) -> float | None:
    value = float(text) if text else None
    if value is not None and not math.isfinite(value):
        raise ValueError(text)
    return value


_READ: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float | None": _finite}
_ORDER = Headers.__struct_fields__
_KINDS = {name: str(Headers.__annotations__[name]) for name in _ORDER}
_NAMES = frozenset(_ORDER)
_OPTIONAL = frozenset({"traceparent"})
_COMPARED_NAMES = tuple(name for name in _ORDER if name not in ("sha256", "traceparent"))
_COMPARED = attrgetter(*_COMPARED_NAMES)
_ELSEWHERE = {"tokens": "length"} | {name: f"meta.{name}" for name in Meta.__struct_fields__}
_SAID_BY = attrgetter(*(_ELSEWHERE.get(name, name) for name in _COMPARED_NAMES))
"""Values of a trajectory in the order of `_COMPARED_NAMES`."""
