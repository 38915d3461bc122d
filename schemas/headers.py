"""What a trajectory's headers say, so that a reader may filter without opening the value.

Names are the fields of `Headers`, values ASCII; an invalid reward is an empty value. Names that
this version does not know are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from dora_pipe.errors import SchemaError
from dora_pipe.schemas.trajectory import Headers, Trajectory

_INTEGER = re.compile("-?(0|[1-9][0-9]{0,18})")
_HEX = re.compile("[0-9a-f]{64}")
_TEXT_CHARACTERS_MAX = 500


def describe(trajectory: Trajectory, *, sha256: str, traceparent: str = "") -> Headers:
    """The headers that a trajectory has, `sha256` being that of its value bytes."""
    meta = trajectory.meta
    return Headers(
        run=meta.run,
        group=meta.group,
        trajectory=trajectory.trajectory,
        attempt=meta.attempt,
        version=trajectory.version,
        deadline=meta.deadline,
        digest=trajectory.digest,
        worker=meta.worker,
        epoch=meta.epoch,
        tokens=len(trajectory.token_ids),
        sampled=trajectory.sampled,
        reward=trajectory.reward,
        schema_version=meta.schema_version,
        sha256=sha256,
        traceparent=traceparent,
    )


def header_pairs(headers: Headers) -> tuple[tuple[str, bytes], ...]:
    """Headers as the bus carries them. Raises SchemaError for what is not ASCII."""
    return tuple((one.name, _write(one.name, getattr(headers, one.name))) for one in _FIELDS)


def headers_of(
    trajectory: Trajectory, *, sha256: str, traceparent: str = ""
) -> tuple[tuple[str, bytes], ...]:
    """The headers of a trajectory as the bus carries them. Raises SchemaError."""
    return header_pairs(describe(trajectory, sha256=sha256, traceparent=traceparent))


def parse_headers(raw: Iterable[tuple[str, bytes]]) -> Headers:
    """Headers from what the bus carries. Raises SchemaError for one missing, twice or invalid."""
    found: dict[str, bytes] = {}
    for name, value in raw:
        if name in found and name in _NAMES:
            raise SchemaError("header is there twice", path=_path(name))
        found[name] = value
    parsed: dict[str, Any] = {}
    for one in _FIELDS:
        if one.name in found:
            parsed[one.name] = _PARSERS[str(one.type)](one.name, _ascii(one.name, found[one.name]))
        elif one.name not in _OPTIONAL:
            raise SchemaError("header is missing", path=_path(one.name))
    for name in ("digest", "sha256"):
        if _HEX.fullmatch(parsed[name]) is None:
            raise SchemaError("not 64 hex digits", path=_path(name))
    return Headers(**parsed)


def matches(headers: Headers, trajectory: Trajectory) -> list[str]:
    """Names of the header fields that disagree with the decoded value; empty when all agree.

    Not compared: `sha256` (of the bytes, not of what they say) and `traceparent`.
    """
    wanted = describe(trajectory, sha256=headers.sha256, traceparent=headers.traceparent)
    return [one.name for one in _FIELDS if getattr(headers, one.name) != getattr(wanted, one.name)]


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
_FIELDS = fields(Headers)
_NAMES = frozenset(one.name for one in _FIELDS)
_OPTIONAL = frozenset({"traceparent"})
