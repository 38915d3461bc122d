"""What a safetensors file holds, tensor by tensor, without torch; it decides what is refused.

The format: eight bytes of header length (little endian), a JSON header, then the bytes of the
tensors one after the other. The header is parsed by hand, so that a hostile file costs no more than
`HEADER_BYTES_MAX` of memory, and tensors are hashed from a memory map.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dora_pipe.errors import PolicyError
from dora_pipe.schemas.policy import Manifest, Tensor, weights_digest

HEADER_BYTES_MAX = 100_000_000
"""Longer headers are refused; the reference implementation draws the same line."""

DIMENSIONS_MAX = 32
"""A product of as many sizes as a header has room for would take for ever."""

LENGTH_BYTES = 8

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
"""Bytes of one element, by the format's own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file; its bytes are [start, end) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Declared(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DECLARED = msgspec.json.Decoder(_Declared)
_METADATA = msgspec.json.Decoder(dict[str, str])
_NO_METADATA = msgspec.Raw(b"{}")


def read_manifest(path: Path) -> Manifest:
    """The manifest of a safetensors file: one pass over its bytes. Raises PolicyError."""
    entries = read_entries(path)
    with mapped(path) as data:
        tensors = [
            Tensor(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                sha256=_sha256(data, entry.start, entry.end),
            )
            for entry in entries
        ]
    return manifest_of(tensors, sum(entry.end - entry.start for entry in entries))


def manifest_of(tensors: Sequence[Tensor], size_bytes: int) -> Manifest:
    """The manifest of tensors that were hashed elsewhere; sorted by name."""
    return Manifest(
        digest=weights_digest(tensors),
        bytes=size_bytes,
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
    )


def read_entries(path: Path) -> list[Entry]:
    """Where each tensor lies, in the order of the file. Raises PolicyError on anything doubtful."""
    return read_header(path)[0]


def read_header(path: Path) -> tuple[list[Entry], dict[str, str]]:
    """`read_entries`, and the texts that the writer put beside the tensors. Raises PolicyError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(LENGTH_BYTES), size)
            header = file.read(length)
    except FileNotFoundError:
        raise PolicyError(f"no weights at {path}") from None
    except OSError as error:
        raise PolicyError(f"{path} cannot be read: {error.strerror}") from None
    return _parsed(path, header, size)


def parse_header(data: memoryview, where: str) -> tuple[list[Entry], dict[str, str]]:
    """As `read_header`, of bytes that are at hand; `where` is what errors call them."""
    length = _header_length(where, bytes(data[:LENGTH_BYTES]), len(data))
    return _parsed(where, bytes(data[LENGTH_BYTES : LENGTH_BYTES + length]), len(data))


def _parsed(where: Path | str, header: bytes, size: int) -> tuple[list[Entry], dict[str, str]]:
    try:
        names = _NAMES.decode(header)
        metadata = _METADATA.decode(names.pop("__metadata__", _NO_METADATA))
        declared = {name: _DECLARED.decode(raw) for name, raw in names.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _garbage(where, f"its header is no header: {error}") from None
    base = LENGTH_BYTES + len(header)
    entries = _placed(where, declared, base)
    if (entries[-1].end if entries else base) != size:
        raise _garbage(where, "its tensors do not fill the file")
    return entries, metadata


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file, read only, without copying them."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
        view = memoryview(pages)
        try:
            yield view
        finally:
            view.release()


def _header_length(path: Path | str, first: bytes, size: int) -> int:
    if len(first) < LENGTH_BYTES:
        raise _garbage(path, f"it has {size} bytes")
    (length,) = struct.unpack("<Q", first)
    if length > min(HEADER_BYTES_MAX, size - LENGTH_BYTES):
        raise _garbage(path, f"it declares a header of {length} bytes")
    return int(length)


def _placed(path: Path | str, declared: dict[str, _Declared], base: int) -> list[Entry]:
    """Entries in file order; they must lie end to end and have the bytes their shape needs."""
    entries: list[Entry] = []
    at = 0
    for name, one in sorted(declared.items(), key=lambda item: item[1].data_offsets):
        start, end = one.data_offsets
        if start != at or _odd(one.shape):
            raise _garbage(path, f"tensor {name!r} does not lie where the one before it ends")
        if one.dtype not in DTYPE_BYTES:
            raise _garbage(path, f"tensor {name!r} has the unknown type {one.dtype!r}")
        if end - start != math.prod(one.shape) * DTYPE_BYTES[one.dtype]:
            raise _garbage(path, f"tensor {name!r} has {end - start} bytes for shape {one.shape}")
        entries.append(
            Entry(name=name, dtype=one.dtype, shape=one.shape, start=base + start, end=base + end)
        )
        at = end
    return entries


def _odd(shape: tuple[int, ...]) -> bool:
    return len(shape) > DIMENSIONS_MAX or any(not 0 <= size < 2**63 for size in shape)


def _sha256(data: memoryview, start: int, end: int) -> str:
    with data[start:end] as part:
        return hashlib.sha256(part).hexdigest()


def _garbage(path: Path | str, why: str) -> PolicyError:
    return PolicyError(f"{path} is not a safetensors file: {why}")
