"""Dead letters: unreadable records with position and reason.

The value is unchanged. The header `dead-letter` is an ASCII JSON object, readable with `kcat`; keys
and header values are base64.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.wire import decode, sha256_hex

HEADER = "dead-letter"
"""Name of the only header."""

DEAD_LETTER_BYTES_MAX = 9 * 1024 * 1024
"""Maximum size in bytes; larger letters omit the value."""

REASON_CHARACTERS_MAX = 2000
_OVERHEAD_BYTES = 1024  # bytes that a bus may add to key, value and headers


class _Letter(msgspec.Struct, frozen=True, kw_only=True):
    """ASCII JSON in the only header, `dead-letter`; the value is that of the unreadable record."""

    topic: str
    partition: int
    offset: int
    reason: str
    path: str
    """Position of the error inside the record."""
    at_ns: int
    sha256: str
    bytes: int
    kept: bool
    """False if the value was omitted for its size."""
    key: str
    """Key in base64."""
    headers: tuple[tuple[str, str], ...]
    """Headers with values in base64."""


_DECODER = msgspec.json.Decoder(_Letter)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """Unreadable record."""

    topic: str
    partition: int
    offset: int
    reason: str
    path: str
    """Position inside the record, from the SchemaError."""
    at_ns: int
    """Unix time in ns of the reading role."""
    key: bytes
    value: bytes | None
    """None if omitted for size; the original record still has it."""
    headers: tuple[tuple[str, bytes], ...] = ()


def encode_dead_letter(
    letter: DeadLetter, *, max_record_bytes: int = DEAD_LETTER_BYTES_MAX
) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
    """Return value and headers within `max_record_bytes`.

    Omits a value that does not fit, but keeps its sha256 and size. Raises SchemaError if the
    headers alone do not fit.
    """
    value = letter.value or b""
    header = _header(letter, value, kept=letter.value is not None)
    if len(header) + len(value) + _OVERHEAD_BYTES > max_record_bytes:
        value, header = b"", _header(letter, value, kept=False)
    if len(header) + _OVERHEAD_BYTES > max_record_bytes:
        raise SchemaError(f"dead letter of {len(header)} bytes is above {max_record_bytes}")
    return value, ((HEADER, header),)


def decode_dead_letter(value: bytes, headers: Iterable[tuple[str, bytes]]) -> DeadLetter:
    """Decode a dead letter. Raises SchemaError."""
    header = dict(headers).get(HEADER)
    if header is None:
        raise SchemaError("header is missing", path=f"$.headers.{HEADER}")
    letter = decode(header, _DECODER, f"$.headers.{HEADER}")
    if letter.kept and (len(value), sha256_hex(value)) != (letter.bytes, letter.sha256):
        raise SchemaError("value is not the one that was kept", path="$.value")
    return DeadLetter(
        topic=letter.topic,
        partition=letter.partition,
        offset=letter.offset,
        reason=letter.reason,
        path=letter.path,
        at_ns=letter.at_ns,
        key=_bytes(letter.key),
        value=value if letter.kept else None,
        headers=tuple((name, _bytes(text)) for name, text in letter.headers),
    )


def _header(letter: DeadLetter, value: bytes, *, kept: bool) -> bytes:
    fields = {
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "reason": letter.reason[:REASON_CHARACTERS_MAX],
        "path": letter.path[:REASON_CHARACTERS_MAX],
        "at_ns": letter.at_ns,
        "sha256": sha256_hex(value),
        "bytes": len(value),
        "kept": kept,
        "key": _text(letter.key),
        "headers": [[name, _text(data)] for name, data in letter.headers],
    }
    # The standard library's encoder can write ASCII only.
    return json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode("ascii")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SchemaError(f"not base64: {error}", path=f"$.headers.{HEADER}") from None
