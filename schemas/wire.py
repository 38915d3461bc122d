"""Canonical JSON encoding of records, and decoding in two stages: tag, then record.

Unknown kinds become `Unknown`; a known kind with invalid content is a `SchemaError` with a path.
NaN and infinities are rejected, because msgspec would write null. Only fields that can hold floats
are checked.
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
"""Stored in `run started` and every trajectory; changes are additive."""

RECORD_BYTES_MAX = 31 * 1024 * 1024
"""Maximum bytes of a JSON record before parsing, and of `bus.max_record_bytes`. A commit lists all
tensors of a version (6 MB for 43,000 expert matrices) and all trajectories of its batch."""

TEXT_BYTES_MAX = 8 * 1024 * 1024
"""Maximum bytes of JSON inside a trajectory."""

_ENCODER = msgspec.json.Encoder(order="deterministic")
_NULL = b"null"
_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)


class _Tag(msgspec.Struct, frozen=True):
    kind: str


class Unknown(msgspec.Struct, frozen=True, kw_only=True):
    """Record of an unknown kind, unchanged."""

    kind: str
    raw: bytes


_TAG = msgspec.json.Decoder(_Tag)


def encode(record: msgspec.Struct) -> bytes:
    """Return canonical JSON: map keys sorted, record fields in declared order. Raises SchemaError
    for NaN, infinity or an unsupported object."""
    try:
        data = _ENCODER.encode(record)
    except (OverflowError, TypeError, UnicodeEncodeError, RecursionError) as error:
        raise SchemaError(f"{type(record).__name__} cannot be written: {error}") from None
    if _NULL in data:  # NaN becomes null: without one skip the check
        refuse_non_finite(record)
    return data


def canonical(value: Any) -> bytes:
    """Return canonical JSON of a plain value; equal values give equal bytes."""
    return _ENCODER.encode(value)


BLAKE3: Final = "blake3-"
"""Prefix of BLAKE3 digests (64 hex digits follow), which are five times as fast as sha256 on large
values."""

BLAKE3_BYTES_MIN: Final = 256 * 1024
"""Minimum bytes of values with BLAKE3 digests."""

DIGEST: Final = re.compile(rf"(?:{BLAKE3})?[0-9a-f]{{64}}")
"""Full digest of either form."""


def value_digest(value: bytes) -> str:
    """Return the digest for writing a value. Example: ``value_digest(b"")[:6]`` is ``"e3b0c4"``."""
    return digest_as(BLAKE3 if len(value) >= BLAKE3_BYTES_MIN else "", value)


def digest_as(named: str, value: bytes) -> str:
    """Return the digest of a value in the form of another digest."""
    if not named.startswith(BLAKE3):
        return sha256_hex(value)
    from blake3 import blake3

    return BLAKE3 + blake3(value).hexdigest()


def sha256_hex(*parts: bytes) -> str:
    """Return the hex sha256 of the concatenated parts."""
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
    """Return a record of a fixed type. Raises SchemaError with the path inside it."""
    if len(data) > bytes_max:
        raise SchemaError(f"record of {len(data)} bytes is above {bytes_max}", path=root)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise schema_error(error, root) from None


def decode_tagged(
    data: bytes, decoder: msgspec.json.Decoder[T], kinds: frozenset[str]
) -> T | Unknown:
    """Return a record of a tagged union, or `Unknown`. Raises SchemaError."""
    kind = decode(data, _TAG).kind
    if kind not in kinds:
        return Unknown(kind=kind, raw=data)
    return decode(data, decoder)


def schema_error(
    error: Exception, root: str = "$", *, what: str = "", hint: str | None = None
) -> SchemaError:
    """Convert a msgspec error; its path is appended to `root`, and `what` precedes the reason."""
    match = _PATH.match(str(error))
    assert match is not None
    path = (match["path"] or "$").removeprefix("$")
    reason = match["what"] or type(error).__name__
    return SchemaError(f"{what}{reason}", path=f"{root}{path}", hint=hint)


def kebab(name: str) -> str:
    """Return a record class's tag: ``WorkerJoined`` is ``worker-joined``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def kinds_of(union: Any) -> frozenset[str]:
    """Return the tags of a union of record classes."""
    return frozenset(kebab(record.__name__) for record in typing.get_args(union))


REWARD_MAX: Final = 1e6
"""Maximum absolute reward.

Prevents overflow: an advantage is at most 2e6, its square 4e12, the sum over 1e9 trajectories 4e21,
below float32's 3e38. Task processes enforce it; readers accept any finite reward, and the trainer
reports overflow as `NonFinite`.
"""

ABSTAINED: Final = "abstained"
"""Part of a reward that abstained, after the reward's name and a dot."""


def refuse_non_finite(value: Any, path: str = "$") -> None:
    """Raises SchemaError with the first non-finite number in `value`."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SchemaError(f"{value} is not a finite number", path=path)
    elif isinstance(value, msgspec.Struct):
        for name in float_fields(type(value)):
            refuse_non_finite(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, dict):
        for key, element in value.items():
            refuse_non_finite(element, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, element in enumerate(value):
            refuse_non_finite(element, f"{path}[{index}]")


@functools.cache
def float_fields(record: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the names of fields that can hold a float at any depth."""
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
