"""How JSON records become bytes and come back: one canonical form, decoded in two stages.

Stage one reads only the tag, stage two the record. A kind that this version does not know becomes
`Unknown` and is kept and counted; a known kind with wrong content is a `SchemaError` with its path.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any, TypeVar

import msgspec

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.finite import refuse_non_finite

T = TypeVar("T")

SCHEMA_VERSION = 1
"""Written into `run started` and every trajectory; grows only by additive changes."""

RECORD_BYTES_MAX = 8 * 1024 * 1024
"""JSON records above this are refused before they are parsed."""

_ENCODER = msgspec.json.Encoder(order="deterministic")
_NULL = b"null"
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


class _Tag(msgspec.Struct, frozen=True):
    kind: str


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """A record of a kind that this version does not know; kept as it came, and counted."""

    kind: str
    raw: bytes


_TAG = msgspec.json.Decoder(_Tag)


def encode(record: msgspec.Struct) -> bytes:
    """Canonical JSON: keys of maps sorted, fields of records in their declared order.

    Raises SchemaError for what JSON cannot say: a NaN, an infinity, an object of some other class.
    """
    try:
        data = _ENCODER.encode(record)
    except (OverflowError, TypeError, UnicodeEncodeError, RecursionError) as error:
        raise SchemaError(f"{type(record).__name__} cannot be written: {error}") from None
    if _NULL in data:  # What a NaN becomes; without one there is nothing to look for.
        refuse_non_finite(record)
    return data


def canonical(value: Any) -> bytes:
    """Canonical JSON of any plain value; equal values give equal bytes."""
    return _ENCODER.encode(value)


def sha256_hex(*parts: bytes) -> str:
    """Hex sha256 of the parts, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def decode(data: bytes, decoder: msgspec.json.Decoder[T], root: str = "$") -> T:
    """One record of a fixed type. Raises SchemaError with the path inside the record."""
    if len(data) > RECORD_BYTES_MAX:
        raise SchemaError(f"record of {len(data)} bytes is above {RECORD_BYTES_MAX}", path=root)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise schema_error(error, root) from None


def decode_tagged(
    data: bytes, decoder: msgspec.json.Decoder[T], kinds: frozenset[str]
) -> T | Unknown:
    """A record of a tagged union, or `Unknown`. Raises SchemaError."""
    kind = decode(data, _TAG).kind
    if kind not in kinds:
        return Unknown(kind=kind, raw=data)
    return decode(data, decoder)


def schema_error(
    error: Exception, root: str = "$", *, what: str = "", hint: str | None = None
) -> SchemaError:
    """Our error for one of msgspec's, with its path kept; `root` is where that path begins, and
    `what` is said before the reason."""
    found = _PATH.match(str(error))
    assert found is not None
    path = (found["path"] or "$").removeprefix("$")
    reason = found["what"] or type(error).__name__
    return SchemaError(f"{what}{reason}", path=f"{root}{path}", hint=hint)


def kebab(name: str) -> str:
    """The tag of a record class: ``WorkerJoined`` is ``worker-joined``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def kinds_of(*records: type[msgspec.Struct]) -> frozenset[str]:
    """The tags of record classes."""
    return frozenset(kebab(record.__name__) for record in records)
