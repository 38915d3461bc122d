"""What a trajectory's headers say, so that a reader may filter without opening the value.

Names are the fields of `Headers`, values ASCII; an invalid reward is an empty value. Names that
this version does not know are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from operator import attrgetter, itemgetter
from typing import Any, Protocol

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.trajectory import Headers, Meta, Trajectory

_TEXT_CHARACTERS_MAX = 500
_DIGESTS = ("digest", "sha256")
_INTEGER = re.compile("-?(?:0|[1-9][0-9]{0,18})")
_HEX = re.compile("[0-9a-f]{64}")


def describe(trajectory: Trajectory, *, sha256: str, traceparent: str = "") -> Headers:
    """The headers that a trajectory has, `sha256` being that of its value bytes."""
    said = dict(zip(_COMPARED_NAMES, _said_by(trajectory), strict=True))
    return Headers(**said, sha256=sha256, traceparent=traceparent)


def header_pairs(headers: Headers) -> tuple[tuple[str, bytes], ...]:
    """Headers as the bus carries them. Raises SchemaError for what is not ASCII."""
    return tuple((name, _write(name, getattr(headers, name))) for name in _ORDER)


def headers_of(
    trajectory: Trajectory, *, sha256: str, traceparent: str = ""
) -> tuple[tuple[str, bytes], ...]:
    """The headers of a trajectory as the bus carries them. Raises SchemaError."""
    return header_pairs(describe(trajectory, sha256=sha256, traceparent=traceparent))


def parse_headers(raw: Iterable[tuple[str, bytes]]) -> Headers:
    """Headers from what the bus carries. Raises SchemaError for one missing, twice or invalid."""
    pairs = tuple(raw)
    return _as_written(pairs) or _one_by_one(pairs)


def _as_written(pairs: tuple[tuple[str, bytes], ...]) -> Headers | None:
    """Headers in the order in which they are written, all at once; None where anything differs."""
    if tuple(map(_FIRST, pairs)) != _ORDER:
        return None
    line = b"\n".join(map(_SECOND, pairs))
    if not line.isascii():
        return None
    found = _LINE.fullmatch(line.decode())
    if found is None:
        return None
    texts = found.groups()
    try:
        reward = float(texts[11]) if texts[11] else None
    except ValueError:
        return None
    if reward is not None and not math.isfinite(reward):
        return None
    return Headers(
        run=texts[0],
        group=texts[1],
        trajectory=texts[2],
        attempt=int(texts[3]),
        version=int(texts[4]),
        deadline=int(texts[5]),
        digest=texts[6],
        worker=texts[7],
        epoch=int(texts[8]),
        tokens=int(texts[9]),
        sampled=int(texts[10]),
        reward=reward,
        schema_version=int(texts[12]),
        sha256=texts[13],
        traceparent=texts[14],
    )


def _one_by_one(raw: Iterable[tuple[str, bytes]]) -> Headers:
    found: dict[str, bytes] = {}
    for name, value in raw:
        if name in found and name in _NAMES:
            raise SchemaError("header is there twice", path=_path(name))
        found[name] = value
    parsed: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        if name in found:
            parsed[name] = _PARSERS[kind](name, _ascii(name, found[name]))
        elif name not in _OPTIONAL:
            raise SchemaError("header is missing", path=_path(name))
    for name in _DIGESTS:
        if _HEX.fullmatch(parsed[name]) is None:
            raise SchemaError("not 64 hex digits", path=_path(name))
    return Headers(**parsed)


class Described(Protocol):
    """What headers are held against: a decoded trajectory, or a glance at one."""

    @property
    def trajectory(self) -> str:
        """Its id."""
        ...

    @property
    def version(self) -> int:
        """Its policy version."""
        ...

    @property
    def digest(self) -> str:
        """Weights digest (hex)."""
        ...

    @property
    def reward(self) -> float | None:
        """None where it is not valid."""
        ...

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        ...

    @property
    def sampled(self) -> int:
        """How many of them the policy sampled."""
        ...

    @property
    def meta(self) -> Meta:
        """Everything else."""
        ...


def matches(headers: Headers, value: Described) -> list[str]:
    """Names of the header fields that disagree with the value; empty when all agree.

    Not compared: `sha256` (of the bytes, not of what they say) and `traceparent`.
    """
    wanted, found = _said_by(value), _COMPARED(headers)
    if wanted == found:
        return []
    return [
        name
        for name, one, other in zip(_COMPARED_NAMES, wanted, found, strict=True)
        if one != other
    ]


def _said_by(value: Described) -> tuple[Any, ...]:
    """What the headers of a value say, in the order of `_COMPARED_NAMES`."""
    meta = value.meta
    return (
        meta.run,
        meta.group,
        value.trajectory,
        meta.attempt,
        value.version,
        meta.deadline,
        value.digest,
        meta.worker,
        meta.epoch,
        value.length,
        value.sampled,
        value.reward,
        meta.schema_version,
    )


def _path(name: str) -> str:
    return f"$.headers.{name}"


def _write(name: str, value: str | int | float | None) -> bytes:
    text = "" if value is None else repr(value) if isinstance(value, float) else str(value)
    if not text.isascii():
        raise SchemaError(f"not ASCII: {text[:60]!a}", path=_path(name))
    return text.encode()


def _ascii(name: str, value: bytes) -> str:
    if not value.isascii() or len(value) > _TEXT_CHARACTERS_MAX:
        raise SchemaError("not ASCII, or too long", path=_path(name))
    return value.decode()


def _text(name: str, text: str) -> str:
    return text


def _integer(name: str, text: str) -> int:
    if _INTEGER.fullmatch(text) is None:
        raise SchemaError(f"not an integer: {text[:60]!r}", path=_path(name))
    return int(text)


def _reward(name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise SchemaError(f"not a finite number: {text[:60]!r}", path=_path(name))
    return value


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "str": _text,
    "int": _integer,
    "float | None": _reward,
}
_ORDER = Headers.__struct_fields__
_KINDS = {name: str(Headers.__annotations__[name]) for name in _ORDER}
_NAMES = frozenset(_ORDER)
_OPTIONAL = frozenset({"traceparent"})
_COMPARED_NAMES = tuple(name for name in _ORDER if name not in ("sha256", "traceparent"))
_COMPARED = attrgetter(*_COMPARED_NAMES)
_FIRST, _SECOND = itemgetter(0), itemgetter(1)


def _pattern(name: str, kind: str) -> str:
    if kind == "int":
        return _INTEGER.pattern
    return _HEX.pattern if name in _DIGESTS else f"[^\n]{{0,{_TEXT_CHARACTERS_MAX}}}"


_LINE = re.compile("\n".join(f"({_pattern(*one)})" for one in _KINDS.items()))
"""All headers, a line each: who holds a newline has one too many."""
