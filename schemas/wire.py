"""How JSON records become bytes and come back: one canonical form, decoded in two stages.

Stage one reads only the tag, stage two the record. A kind that this version does not know becomes
`Unknown` and is kept and counted; a known kind with wrong content is a `SchemaError` with its path.

Numbers are finite: msgspec would write a NaN or an infinity as null, and no reader takes that. Only
fields whose type can hold a float are walked, so a record without any costs one look-up.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
import typing
from typing import Any, Final, TypeVar

import msgspec

from dora_pipe.core.errors import SchemaError

T = TypeVar("T")

SCHEMA_VERSION = 1
"""Written into `run started` and every trajectory; grows only by additive changes."""

RECORD_BYTES_MAX = 31 * 1024 * 1024
"""JSON records above this are refused before they are parsed: what `bus.record_bytes_max` may be at
most. A commit names all tensors of a version (6 MB in a mixture of 43 000 experts' matrices) and
all trajectories of its batch."""

TEXT_BYTES_MAX = 8 * 1024 * 1024
"""The same of JSON inside a trajectory."""

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


BLAKE3: Final = "blake3-"
"""How a digest begins that is not sha256 but BLAKE3; 64 hex digits follow. That is a tree, and goes
through a large value some five times as fast. The form is read from the digest."""

BLAKE3_BYTES_MIN: Final = 256 * 1024
"""Size of a value from which on its digest has that form."""

DIGEST: Final = re.compile(rf"(?:{BLAKE3})?[0-9a-f]{{64}}")
"""A digest of either form, whole."""


def value_digest(value: bytes) -> str:
    """That of a value which is written now. Example: ``value_digest(b"")[:6]`` is ``"e3b0c4"``."""
    return digest_as(BLAKE3 if len(value) >= BLAKE3_BYTES_MIN else "", value)


def digest_as(named: str, value: bytes) -> str:
    """The digest of a value in the form that another digest has."""
    if not named.startswith(BLAKE3):
        return sha256_hex(value)
    from blake3 import blake3

    return BLAKE3 + blake3(value).hexdigest()


def sha256_hex(*parts: bytes) -> str:
    """Hex sha256 of the parts, one after the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def decode(
    data: bytes,
    decoder: msgspec.json.Decoder[T],
    root: str = "$",
    *,
    bytes_max: int = RECORD_BYTES_MAX,
) -> T:
    """One record of a fixed type. Raises SchemaError with the path inside the record."""
    if len(data) > bytes_max:
        raise SchemaError(f"record of {len(data)} bytes is above {bytes_max}", path=root)
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


def kinds_of(union: Any) -> frozenset[str]:
    """The tags of a union of record classes."""
    return frozenset(kebab(record.__name__) for record in typing.get_args(union))


REWARD_MAX: Final = 1e6
"""Largest absolute value of a reward that a task may give.

Within it nothing that is made of rewards overflows: an advantage is a difference of two of them,
2e6 at most, or that divided by their standard deviation; its square is 4e12, the sum of those over
a batch of 1e9 trajectories is 4e21, and float32, in which losses and gradients are computed, ends
at 3e38. The task process enforces it; readers take every finite reward, and a trainer reports a
batch that overflows as `NonFinite`.
"""

ABSTAINED: Final = "abstained"
"""Name of the part of a reward that abstained, after its own name and a dot."""


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
