"""Mutations of inputs that pass the first check of a decoder.

The content of zstd frames, headers and JSON is mutated by itself and encoded again. One input in
eight is mutated as raw bytes.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from random import Random
from typing import Any, Final

import zstandard

from tests.fuzz.targets import Shape

Plain = Callable[[bytes, int], bytes]
"""The fuzzer's own mutation: (input, bytes at most) to another input."""

RAW_BYTES_MAX: Final = 1 << 20
PLAIN_SHARE: Final = 1 / 8
_LENGTH_BYTES: Final = 8

ODD: Final[tuple[Any, ...]] = (
    None,
    True,
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**63,
    2**64,
    10**30,
    0.5,
    1e308,
    5e-324,
    -0.0,
    "",
    "\0",
    "\ud800",
    "a\nb",
    "g0000000042-003",
    "0" * 64,
    [],
    {},
    [[]],
    {"": None},
)
"""What a JSON value becomes."""

TEXTS: Final = (b"NaN", b"1e999", b"-0", b"1" * 400, b'"\\ud800"', b"[" * 400, b'{"a":' * 400)
"""What `json` would not write."""


def mutate(shape: Shape, data: bytes, size_max: int, chance: Random, plain: Plain) -> bytes:
    if chance.random() < PLAIN_SHARE:
        return plain(data, size_max)
    changed = _SHAPES[shape](data, chance, plain)
    return changed[:size_max]


def _frame(data: bytes, chance: Random, plain: Plain) -> bytes:
    try:
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=RAW_BYTES_MAX)
    except (zstandard.ZstdError, MemoryError):
        return plain(data, len(data) + 64)
    changed = bytearray(raw)
    if chance.random() < 0.5 and len(changed) >= 8:
        width, pattern = chance.choice(((2, "<H"), (4, "<i"), (8, "<q")))
        position = chance.randrange(len(changed) - width + 1) & ~1
        position = min(position, len(changed) - width)
        limit = 1 << (8 * width - 1)
        signed = chance.choice((0, 1, 2, 3, 8, 127, 255, limit - 1, chance.randrange(limit)))
        signed = -signed if chance.random() < 0.2 and pattern != "<H" else signed
        struct.pack_into(pattern, changed, position, signed)
        return _compressed(bytes(changed))
    return _compressed(plain(raw, RAW_BYTES_MAX))


def _compressed(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(raw)


def _json(data: bytes, chance: Random, plain: Plain) -> bytes:
    text, newline, rest = data.partition(b"\n")
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return plain(data, len(data) + 64)
    places = _places(tree) if isinstance(tree, dict | list) else []
    if not places:
        return plain(data, len(data) + 64)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        holder, key = chance.choice(places)
        _change(holder, key, chance, chance.choice(places))
    changed = json.dumps(tree, separators=(",", ":")).encode()
    if chance.random() < 0.2:
        changed = _textual(changed, chance)
    return changed + newline + rest


def _places(tree: Any) -> list[tuple[Any, Any]]:
    results: list[tuple[Any, Any]] = []
    open_: list[Any] = [tree]
    while open_:
        entry = open_.pop()
        keys = entry.keys() if isinstance(entry, dict) else range(len(entry))
        for key in keys:
            results.append((entry, key))
            if isinstance(entry[key], dict | list):
                open_.append(entry[key])
    return results


def _change(holder: Any, key: Any, chance: Random, other: tuple[Any, Any]) -> None:
    try:
        value = holder[key]
        if chance.random() < 0.15:
            del holder[key]
        elif chance.random() < 0.15 and isinstance(holder, dict):
            holder[chance.choice(("kind", "", "x", "at_ns"))] = value
        elif chance.random() < 0.2:
            # A copy, so that the tree stays one.
            holder[key] = json.loads(json.dumps(other[0][other[1]]))
        else:
            holder[key] = chance.choice(ODD)
    except (KeyError, IndexError):
        return


def _textual(text: bytes, chance: Random) -> bytes:
    position = text.find(b":", chance.randrange(len(text)))
    if position < 0:
        return text
    if chance.random() < 0.3:
        return text[:-1] + b"," + text[1:]
    end = min(
        (result for result in (text.find(b",", position), text.find(b"}", position)) if result > 0),
        default=position,
    )
    return text[: position + 1] + chance.choice(TEXTS) + text[end:]


def _lines(data: bytes, chance: Random, plain: Plain) -> bytes:
    lines = data.split(b"\n")
    index = chance.randrange(len(lines))
    how = chance.randrange(5)
    if how == 0:
        lines.insert(index, chance.choice(lines))
    elif how == 1:
        del lines[index]
    elif how == 2 and b"=" in lines[index]:
        lines[index] = lines[index].partition(b"=")[0] + b"= " + chance.choice(_TOML)
    elif how == 3 and b": " in lines[index]:
        lines[index] = lines[index].partition(b": ")[0] + b": " + chance.choice(_HEADERS)
    else:
        lines[index] = plain(lines[index] or b" ", len(lines[index]) + 32)
    return b"\n".join(lines)


_TOML: Final = (
    *(json.dumps(one).encode() for one in ODD if one != "\ud800"),
    *(b"nan", b"-inf", b"1979-05-27T07:32:00Z", b"07:32:00", b"[" * 400, b"{a=" * 400),
    *(b"9" * 5000, b"1e999", b"0x" + b"f" * 5000, b"'''\n'''", b'"\\u0000"', b"{}", b"[{}]"),
)
_HEADERS: Final = (b"", b"-0", b"-1", b"9" * 19, b"1e5", b"nan", b"\xff", b"x" * 501, b"1_0", b" 1")


def _safetensors(data: bytes, chance: Random, plain: Plain) -> bytes:
    if len(data) < _LENGTH_BYTES:
        return plain(data, len(data) + 64)
    (length,) = struct.unpack_from("<Q", data)
    header, rest = data[8 : 8 + length], data[8 + length :]
    changed = _json(header.replace(b"\n", b""), chance, plain)
    return struct.pack("<Q", len(changed)) + changed + rest


def _delta(data: bytes, chance: Random, plain: Plain) -> bytes:
    end = len(data) - 40
    (length,) = struct.unpack_from("<Q", data, end) if end > 0 else (0,)
    if not 0 < length < end:
        return plain(data, len(data) + 64)
    frames, head = data[: end - length], data[end - length : end]
    if chance.random() < 0.3:
        frames = plain(frames, len(frames))
    else:
        head = _json(head, chance, plain)
    body = frames + head + struct.pack("<Q", len(head))
    return body + hashlib.sha256(body).digest()


_SHAPES: Final[dict[Shape, Callable[[bytes, Random, Plain], bytes]]] = {
    "frame": _frame,
    "json": _json,
    "lines": _lines,
    "delta": _delta,
    "safetensors": _safetensors,
}
