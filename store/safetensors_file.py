"""Safetensors files, read, checked and written by tensor, without torch.

Format: header length (8 bytes, little endian), JSON header, tensor bytes. Parsing by hand bounds
the memory that a hostile header costs by `HEADER_BYTES_MAX`. Tensors are written sorted by name
with the header padded to 8 bytes: equal tensors give equal files.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from dora_pipe.core.errors import NonFinite, PolicyError, ResourceError
from dora_pipe.schemas.policy import Manifest, Tensor, weights_digest

HEADER_BYTES_MAX = 100_000_000
"""Maximum header bytes, as in the reference implementation."""

DIMENSIONS_MAX = 32
"""Bounds the product of dimensions."""

LENGTH_BYTES = 8

_NAN: Final = 0x7FC0
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
"""Element sizes."""

_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])

_METADATA = msgspec.json.Decoder(dict[str, str])

_NO_METADATA = msgspec.Raw(b"{}")

PIECE_BYTES: Final = 4 << 20
"""Bytes checked at once."""

_FLOATS: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}

_BF16_EXPONENT: Final = 0x7F80
"""All ones in infinities and NaNs."""

BESIDE_BYTES: Final = 64 << 20
"""Minimum file size for hashing in threads."""

HASHERS_MAX = 4
"""Maximum threads, and tensors in memory."""

WEIGHTS_HINT: Final = "check that they are complete; repair or replace that file"

METADATA = {"format": "pt"}
"""transformers requires it."""


_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Tensor of a file; its bytes are [start, end)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class _Declared(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_DECLARED = msgspec.json.Decoder(_Declared)


def read_manifest(path: Path) -> Manifest:
    """Read a file once and return its manifest. Raises PolicyError."""
    entries = read_entries(path)
    size = sum(entry.end - entry.start for entry in entries)
    with mapped(path) as data:

        def hashed(entry: Entry) -> Tensor:
            return _tensor(entry, _sha256(data, entry.start, entry.end))

        tensors = list(in_threads(hashed, entries, size))
    return manifest_of(tensors, size)


def manifest_of(tensors: Sequence[Tensor], size_bytes: int) -> Manifest:
    """Return the manifest of hashed tensors."""
    return Manifest(
        digest=weights_digest(tensors),
        bytes=size_bytes,
        tensors=tuple(sorted(tensors, key=lambda tensor: tensor.name)),
    )


def read_entries(path: Path) -> list[Entry]:
    """Return the tensors in file order. Raises PolicyError for an invalid header, ResourceError if
    unreadable."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _header_length(path, file.read(LENGTH_BYTES), size)
            header = file.read(length)
    except FileNotFoundError:
        raise PolicyError(f"no weights at {path}") from None
    except OSError as error:
        raise ResourceError(f"{path} cannot be read: {error.strerror}") from None
    return _parsed(path, header, size)[0]


def parse_header(data: memoryview, where: str) -> tuple[list[Entry], dict[str, str]]:
    """Parse a header; `where` names it in errors."""
    length = _header_length(where, bytes(data[:LENGTH_BYTES]), len(data))
    return _parsed(where, bytes(data[LENGTH_BYTES : LENGTH_BYTES + length]), len(data))


def _parsed(where: Path | str, header: bytes, size: int) -> tuple[list[Entry], dict[str, str]]:
    try:
        names = _NAMES.decode(header)
        metadata = _METADATA.decode(names.pop("__metadata__", _NO_METADATA))
        declared = {name: _DECLARED.decode(raw) for name, raw in names.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _garbage(where, f"its header is invalid: {error}") from None
    base = LENGTH_BYTES + len(header)
    entries = _placed(where, declared, base)
    if (entries[-1].end if entries else base) != size:
        raise _garbage(where, "its tensors do not match the file size")
    return entries, metadata


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """Memory-map a file read-only."""
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
    entries: list[Entry] = []
    position = 0
    for name, tensor in sorted(declared.items(), key=lambda item: item[1].data_offsets):
        start, end = tensor.data_offsets
        if start != position or is_odd(tensor.shape):
            raise _garbage(path, f"tensor {name!r} does not start at the end of the previous one")
        if tensor.dtype not in DTYPE_BYTES:
            raise _garbage(path, f"tensor {name!r} has the unknown type {tensor.dtype!r}")
        if end - start != math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]:
            raise _garbage(
                path, f"tensor {name!r} has {end - start} bytes for shape {tensor.shape}"
            )
        entries.append(
            Entry(
                name=name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                start=base + start,
                end=base + end,
            )
        )
        position = end
    return entries


def is_odd(shape: tuple[int, ...]) -> bool:
    """Return whether a shape is invalid."""
    return len(shape) > DIMENSIONS_MAX or any(not 0 <= size < 2**63 for size in shape)


def _sha256(data: memoryview, start: int, end: int) -> str:
    """Hash a range without keeping its pages in memory."""
    digest = hashlib.sha256()
    for position in range(start, end, PIECE_BYTES):
        until = min(position + PIECE_BYTES, end)
        with data[position:until] as part:
            digest.update(part)
        if isinstance(data.obj, mmap.mmap):
            first = position - position % mmap.PAGESIZE
            data.obj.madvise(mmap.MADV_DONTNEED, first, until - first)
    return digest.hexdigest()


def _garbage(path: Path | str, why: str) -> PolicyError:
    return PolicyError(f"{path} is not a safetensors file: {why}")


def count_non_finite(dtype: str, data: memoryview) -> int:
    """Count NaNs and infinities, without references to `data` that an error would keep."""
    if dtype not in _FLOATS and dtype != "BF16":
        return 0
    count = 0
    for start in range(0, len(data), PIECE_BYTES):
        with data[start : start + PIECE_BYTES] as piece:
            if dtype == "BF16":
                bits = np.frombuffer(piece, dtype="<u2") & _BF16_EXPONENT
                count += int(np.count_nonzero(bits == _BF16_EXPONENT))
            else:
                numbers = np.frombuffer(piece, dtype=_FLOATS[dtype])
                count += int(np.count_nonzero(~np.isfinite(numbers)))
    return count


def refuse_non_finite(name: str, dtype: str, data: memoryview) -> None:
    """Raises NonFinite with tensor and count."""
    if count := count_non_finite(dtype, data):
        size = len(data) // DTYPE_BYTES[dtype]
        raise NonFinite(f"tensor {name!r}: {count:,} of {size:,} numbers are NaN or infinite")


def refuse_non_finite_file(path: Path) -> None:
    """Check a file's tensors. Raises PolicyError."""
    entries = read_entries(path)
    with mapped(path) as data:
        for entry in entries:
            with data[entry.start : entry.end] as part:
                try:
                    refuse_non_finite(entry.name, entry.dtype, part)
                except NonFinite as error:
                    raise PolicyError(f"{path}: {error.message}", hint=WEIGHTS_HINT) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Tensor to write; `data` returns row-major little-endian bytes and is called once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], bytes | memoryview]

    @classmethod
    def of(cls, entry: Entry, data: Callable[[], bytes | memoryview]) -> TensorSource:
        """Return a source with an entry's name, type and shape."""
        return cls(name=entry.name, dtype=entry.dtype, shape=entry.shape, data=data)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def write_tensors(path: Path, sources: Iterable[TensorSource]) -> Manifest:
    """Write a file without sync, and return its manifest. Raises OSError, NonFinite."""
    ordered = sorted(sources, key=lambda source: source.name)
    header, size = _header(ordered), sum(source.bytes for source in ordered)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)

        def written() -> Iterator[tuple[TensorSource, memoryview]]:
            for source in ordered:
                data = memoryview(source.data()).cast("B")
                assert len(data) == source.bytes, source.name
                file.write(data)
                yield source, data

        described = list(in_threads(_described, written(), size))
    return manifest_of(described, size)


def _tensor(source: Entry | TensorSource, sha256: str) -> Tensor:
    return Tensor(name=source.name, dtype=source.dtype, shape=source.shape, sha256=sha256)


def _described(source_data: tuple[TensorSource, memoryview]) -> Tensor:
    source, data = source_data
    with data:
        refuse_non_finite(source.name, source.dtype, data)
        return _tensor(source, hashlib.sha256(data).hexdigest())


def in_threads(do: Callable[[_T], _R], each: Iterable[_T], size_bytes: int) -> Iterator[_R]:
    """Map in order; large inputs use threads with bounded lookahead."""
    threads = min(HASHERS_MAX, len(os.sched_getaffinity(0)))
    if size_bytes < BESIDE_BYTES or threads == 1:
        yield from map(do, each)
        return
    pending: deque[Future[_R]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="hashing") as pool:
        for described in each:
            pending.append(pool.submit(do, described))
            if len(pending) == threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


@contextmanager
def file_sources(path: Path) -> Iterator[list[TensorSource]]:
    """Yield a file's tensors as sources. Raises PolicyError."""
    entries = read_entries(path)
    with mapped(path) as data:
        yield [TensorSource.of(entry, partial(content_of, entry, data)) for entry in entries]


def content_of(entry: Entry, data: memoryview) -> bytes:
    """Return a copy of a tensor's bytes."""
    return bytes(data[entry.start : entry.end])


def manifest_in_memory(sources: Iterable[TensorSource]) -> Manifest:
    """Return `write_tensors`'s manifest without writing."""
    described, size_bytes = [], 0
    for source in sources:
        with memoryview(source.data()).cast("B") as data:
            described.append(_tensor(source, hashlib.sha256(data).hexdigest()))
            size_bytes += len(data)
    return manifest_of(described, size_bytes)


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert BF16 bits, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrowed(numbers: NDArray[np.floating[Any]]) -> NDArray[np.uint16]:
    """Round to BF16 bits once, to nearest even."""
    single = numbers.astype(np.float32)
    bits = single.view(np.uint32)
    if numbers.dtype.itemsize > single.dtype.itemsize:
        bits = _to_odd(numbers, single)
    narrow = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype("<u2")
    narrow[np.isnan(single)] = _NAN  # overflow may have changed NaNs
    return narrow


def _to_odd(numbers: NDArray[np.floating[Any]], single: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return float32 bits rounded to odd, for correct rounding afterwards (Boldo and Melquiond
    2008, "Emulation of FMA and correctly rounded sums", theorem 3)."""
    wide = single.astype(np.float64)
    bits = single.view(np.uint32) - (np.abs(wide) > np.abs(numbers)).astype(np.uint32)
    odd: NDArray[np.uint32] = bits | (wide != numbers).astype(np.uint32)
    return odd


def _header(sources: Iterable[TensorSource]) -> bytes:
    fields: dict[str, Mapping[str, object]] = {"__metadata__": METADATA}
    position = 0
    for source in sources:
        fields[source.name] = {
            "dtype": source.dtype,
            "shape": list(source.shape),
            "data_offsets": [position, position + source.bytes],
        }
        position += source.bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
