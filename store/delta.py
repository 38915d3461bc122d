"""Delta between two versions of a policy in one file: positions and new values.

Most bfloat16 weights keep their bits at small learning rates. Bits are compared (0.0 and -0.0
differ) and overwritten.

    8 bytes             dpdelta1
    frames              of every block that has changes: gaps between positions, then values
    head                JSON, see `_Head`
    8 bytes             length of the head, little endian
    32 bytes            sha256 of all before it

A tensor is split into blocks of `BLOCK_ELEMENTS`. Each position is one byte, the number of
unchanged elements since the last; 255 means 255 and continue. Values are stored by byte plane, low
bytes first. Each part is a zstd frame. A block with more than half changed is stored in full,
without positions.

Readers verify sha256 and head first, and hold one tensor in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dora_pipe.core.errors import NonFinite, PolicyError, ResourceError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.safetensors_file import (
    DTYPE_BYTES,
    HEADER_BYTES_MAX,
    Entry,
    TensorSource,
    in_threads,
    is_odd,
    mapped,
    read_entries,
    write_tensors,
)
from dora_pipe.store.verified import AGAIN

MAGIC: Final = b"dpdelta1"
BLOCK_ELEMENTS: Final = 1 << 22
"""Bounds an unpacked block to 32 MiB."""

ZSTD_LEVEL: Final = 1
"""Higher levels save nothing: gaps and mantissas look random."""

GROWTH_MAX: Final = 2
BYTES_FREE: Final = 64 << 20
"""Bytes that a result may have beyond `GROWTH_MAX` times its base; bounds hostile deltas."""

_PASSED: Final = 255
_LENGTH_BYTES: Final = 8
_SHA_BYTES: Final = 32
_LEAST: Final = len(MAGIC) + _LENGTH_BYTES + _SHA_BYTES

Bits = NDArray[np.unsignedinteger[Any]]
"""Stored bits."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    """Element count and frame sizes in bytes of a block."""

    count: int
    """Changed elements; all of the block if stored in full, 0 without frames."""
    gaps: int
    """Bytes of the unpacked positions; 0 for a full block."""
    gaps_frame: int
    values_frame: int


class Changed(msgspec.Struct, frozen=True, array_like=True):
    """Changed or new tensor; new ones have only full blocks."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[Block, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    before: str
    """Base digest (hex)."""
    after: str
    """Result digest (hex)."""
    tensors: tuple[Changed, ...]
    """In frame order."""
    gone: tuple[str, ...] = ()
    """Removed tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Size of a delta in elements."""

    changed: int
    elements: int

    @property
    def share(self) -> float:
        """Return the changed fraction."""
        return self.changed / max(1, self.elements)


_DECODER: Final = msgspec.json.Decoder(_Head)


# Writing


def write_delta(
    path: Path, before: Path, after: Path, *, digest_before: str, digest_after: str
) -> Change:
    """Write the differences of `after` from `before` without sync. Raises PolicyError, OSError."""
    old = {entry.name: entry for entry in read_entries(before)}
    new = sorted(read_entries(after), key=lambda entry: entry.name)
    elements = sum(math.prod(entry.shape) for entry in new)
    with mapped(before) as old_data, mapped(after) as new_data, path.open("w+b") as file:
        file.write(MAGIC)
        jobs = [
            partial(_packed, entry, start, _same(entry, old), (old_data, new_data))
            for entry in new
            for start in _starts(math.prod(entry.shape))
        ]
        packed = in_threads(lambda job: job(), jobs, sum(entry.end - entry.start for entry in new))
        tensors, changed = _written(file, new, old, packed)
        head = _Head(
            before=digest_before,
            after=digest_after,
            tensors=tuple(tensors),
            gone=tuple(sorted(old.keys() - {entry.name for entry in new})),
        )
        encoded = msgspec.json.encode(head)
        file.write(encoded + struct.pack("<Q", len(encoded)))
        file.seek(0)
        file.write(hashlib.file_digest(file, "sha256").digest())
    return Change(changed=changed, elements=elements)


@dataclass(slots=True)
class _Packed:
    changed: int
    block: Block
    frames: tuple[bytes, bytes] = (b"", b"")


def _written(
    file: BinaryIO, new: Sequence[Entry], old: Mapping[str, Entry], packed: Iterator[_Packed]
) -> tuple[list[Changed], int]:
    tensors: list[Changed] = []
    changed = 0
    for entry in new:
        blocks: list[Block] = []
        for _ in _starts(math.prod(entry.shape)):
            tensor = next(packed)
            blocks.append(tensor.block)
            changed += tensor.changed
            file.writelines(tensor.frames)
        if any(block.count for block in blocks) or _same(entry, old) is None:
            tensors.append(Changed(entry.name, entry.dtype, entry.shape, tuple(blocks)))
    return tensors, changed


def _same(entry: Entry, old: Mapping[str, Entry]) -> Entry | None:
    base = old.get(entry.name)
    return base if base and (base.dtype, base.shape) == (entry.dtype, entry.shape) else None


def _packed(
    entry: Entry, start: int, old: Entry | None, data: tuple[memoryview, memoryview]
) -> _Packed:
    item = DTYPE_BYTES[entry.dtype]
    size = min(BLOCK_ELEMENTS, math.prod(entry.shape) - start)
    now = _bits(data[1], entry.start + start * item, size, item)
    if old is None:
        return _whole(now, size)
    differs = now != _bits(data[0], old.start + start * item, size, item)
    changed = int(np.count_nonzero(differs))
    if changed == 0:
        return _Packed(0, Block(0, 0, 0, 0))
    if changed > size // 2:
        return _whole(now, changed)
    positions = np.flatnonzero(differs)
    gaps = gaps_of(positions)
    frames = (_compressed(gaps), _compressed(_planes(now[positions])))
    return _Packed(changed, Block(changed, gaps.size, len(frames[0]), len(frames[1])), frames)


def _whole(now: Bits, changed: int) -> _Packed:
    frame = _compressed(_planes(now))
    return _Packed(changed, Block(now.size, 0, 0, len(frame)), (b"", frame))


def gaps_of(positions: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Encode ascending positions as gap bytes."""
    passed, rest = np.divmod(np.diff(positions, prepend=-1) - 1, _PASSED)
    last = np.cumsum(passed + 1) - 1
    out = np.full(int(last[-1]) + 1 if last.size else 0, _PASSED, np.uint8)
    out[last] = rest
    return out


def positions_of(gaps: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Decode gap bytes to ascending positions, for any input."""
    ends = np.flatnonzero(gaps != _PASSED)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)


def _planes(bits: Bits) -> NDArray[np.uint8]:
    return np.ascontiguousarray(bits.view(np.uint8).reshape(-1, bits.itemsize).T)


def _compressed(data: NDArray[np.uint8]) -> bytes:
    frame: bytes = pa.Codec("zstd", ZSTD_LEVEL).compress(data.data, asbytes=True)
    return frame


def _bits(data: memoryview, start: int, size: int, item: int) -> Bits:
    return np.frombuffer(data, dtype=f"<u{item}", count=size, offset=start)


def _starts(size: int) -> range:
    return range(0, size, BLOCK_ELEMENTS)


# Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Delta with verified sha256 and head; unpacks frames on demand."""

    where: str
    before: str
    after: str
    tensors: Mapping[str, Changed]
    gone: tuple[str, ...]
    _starts: Mapping[str, int] = field(repr=False)
    """Offsets of each tensor's frames."""
    _data: memoryview = field(repr=False)

    def apply(self, name: str, bits: Bits) -> None:
        """Overwrite a flat tensor's changed elements. Raises PolicyError."""
        tensor, offset = self.tensors[name], self._starts[name]
        for start, block in zip(_starts(tensor.size), tensor.blocks, strict=True):
            into = bits[start : start + BLOCK_ELEMENTS]
            if block.count:
                values = self._values(offset + block.gaps_frame, block, bits.itemsize)
                if block.gaps:
                    into[self._positions(offset, block, into.size)] = values
                else:
                    into[:] = values
            offset += block.gaps_frame + block.values_frame

    def _values(self, offset: int, block: Block, item: int) -> Bits:
        raw = self._unpacked(offset, block.values_frame, block.count * item)
        return np.ascontiguousarray(raw.reshape(item, -1).T).view(f"<u{item}").reshape(-1)

    def _positions(self, offset: int, block: Block, size: int) -> NDArray[np.int64]:
        positions = positions_of(self._unpacked(offset, block.gaps_frame, block.gaps))
        if positions.size != block.count or (positions.size and positions[-1] >= size):
            raise _refused(self.where, "its positions differ from its header")
        return positions

    def _unpacked(self, offset: int, size: int, raw: int) -> NDArray[np.uint8]:
        try:
            data = pa.Codec("zstd").decompress(self._data[offset : offset + size], raw)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise _refused(self.where, f"cannot unpack a frame: {error}") from None
        return np.frombuffer(data, np.uint8)


@contextmanager
def opened_delta(path: Path) -> Iterator[Delta]:
    """Map and verify a delta. Raises PolicyError if invalid, ResourceError if unreadable."""
    with ExitStack() as stack:
        try:
            if path.stat().st_size < _LEAST:
                raise _refused(path, "it is too short")
            data = stack.enter_context(mapped(path))
        except FileNotFoundError:
            raise PolicyError(f"no delta at {path}", hint=AGAIN) from None
        except OSError as error:
            raise ResourceError(f"{path} cannot be read: {error.strerror}") from None
        yield parse_delta(data, str(path))


def parse_delta(data: memoryview, where: str) -> Delta:
    """Parse a delta. Raises PolicyError."""
    if len(data) < _LEAST or bytes(data[: len(MAGIC)]) != MAGIC:
        raise _refused(where, "it has no delta header")
    end = len(data) - _SHA_BYTES
    with data[:end] as signed:
        if hashlib.sha256(signed).digest() != data[end:]:
            raise _refused(where, "its checksum differs")
    (length,) = struct.unpack("<Q", data[end - _LENGTH_BYTES : end])
    frames_end = end - _LENGTH_BYTES - length
    if length > HEADER_BYTES_MAX or frames_end < len(MAGIC):
        raise _refused(where, f"it declares a header of {length} bytes")
    try:
        head = _DECODER.decode(data[frames_end : end - _LENGTH_BYTES])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(where, f"its header is invalid: {error}") from None
    starts: dict[str, int] = {}
    offset = len(MAGIC)
    for tensor in head.tensors:
        if why := _wrong(tensor):
            raise _refused(where, f"tensor {tensor.name!r}: {why}")
        starts[tensor.name] = offset
        offset += sum(block.gaps_frame + block.values_frame for block in tensor.blocks)
    if offset != frames_end or len(starts) != len(head.tensors):
        raise _refused(where, "its frames do not match its size")
    return Delta(
        where=where,
        before=head.before,
        after=head.after,
        tensors={tensor.name: tensor for tensor in head.tensors},
        gone=head.gone,
        _starts=starts,
        _data=data,
    )


def _wrong(tensor: Changed) -> str:
    if tensor.dtype not in DTYPE_BYTES or is_odd(tensor.shape):
        return "unknown type or shape"
    if len(tensor.blocks) != len(_starts(tensor.size)):
        return f"{len(tensor.blocks)} blocks for shape {tensor.shape}"
    for start, block in zip(_starts(tensor.size), tensor.blocks, strict=True):
        size = min(BLOCK_ELEMENTS, tensor.size - start)
        if not _fits(block, size):
            return f"a block of {size} elements cannot be {msgspec.to_builtins(block)}"
    return ""


def _fits(block: Block, size: int) -> bool:
    if min(block.gaps, block.gaps_frame, block.values_frame) < 0 or not 0 <= block.count <= size:
        return False
    sparse = 0 < block.count < size
    if not sparse:
        return block.gaps == block.gaps_frame == 0 and (block.values_frame > 0) == (block.count > 0)
    most = block.count + size // _PASSED
    return block.count <= block.gaps <= most and block.gaps_frame > 0 < block.values_frame


# Applying


@contextmanager
def opened_deltas(paths: Iterable[Path]) -> Iterator[list[Delta]]:
    """Open consecutive deltas. Raises PolicyError."""
    with ExitStack() as stack:
        deltas = [stack.enter_context(opened_delta(path)) for path in paths]
        for delta, after in itertools.pairwise(deltas):
            if delta.after != after.before:
                raise _refused(after.where, f"it does not follow {delta.where}")
        yield deltas


def write_from_deltas(path: Path, base: Path, deltas: Sequence[Delta]) -> Manifest:
    """Apply deltas to `base` without sync. Raises PolicyError for a wrong result, OSError."""
    entries = read_entries(base)
    with mapped(base) as data:
        sources = _sources(entries, data, deltas)
        limit = GROWTH_MAX * len(data) + BYTES_FREE
        if sum(source.bytes for source in sources) > limit:
            raise _refused(deltas[-1].where, f"it produces more than {limit} bytes of {base}")
        try:
            manifest = write_tensors(path, sources)
        except NonFinite as error:
            raise _refused(deltas[-1].where, error.message) from None
    if manifest.digest != deltas[-1].after:
        raise PolicyError(
            f"{deltas[-1].where} does not make version {deltas[-1].after[:12]}... of {base} "
            f"({len(deltas)} deltas, {manifest.digest[:12]}... came out)",
            hint=AGAIN,
        )
    return manifest


@dataclass(frozen=True, slots=True)
class _Layers:
    dtype: str
    shape: tuple[int, ...]
    base: Entry | None
    deltas: tuple[Delta, ...] = ()


def _sources(
    entries: Sequence[Entry], data: memoryview, deltas: Sequence[Delta]
) -> list[TensorSource]:
    layers = {entry.name: _Layers(entry.dtype, entry.shape, entry) for entry in entries}
    for delta in deltas:
        for name in delta.gone:
            if layers.pop(name, None) is None:
                raise _refused(delta.where, f"tensor {name!r} is to be removed but missing")
        for name, tensor in delta.tensors.items():
            layers[name] = _over(layers.get(name), delta, tensor)
    return [
        TensorSource(
            name=name,
            dtype=layer.dtype,
            shape=layer.shape,
            data=partial(_tensor_bytes, name, layer, data),
        )
        for name, layer in layers.items()
    ]


def _over(below: _Layers | None, delta: Delta, tensor: Changed) -> _Layers:
    if below is not None and (below.dtype, below.shape) == (tensor.dtype, tensor.shape):
        return _Layers(tensor.dtype, tensor.shape, below.base, (*below.deltas, delta))
    if any(block.gaps or not block.count for block in tensor.blocks):
        raise _refused(delta.where, f"tensor {tensor.name!r} is new but not complete")
    return _Layers(tensor.dtype, tensor.shape, None, (delta,))


def _tensor_bytes(name: str, layers: _Layers, data: memoryview) -> memoryview:
    """Apply the deltas of a tensor; a copy, since the base's file may be unmapped."""
    base, item = layers.base, DTYPE_BYTES[layers.dtype]
    size = math.prod(layers.shape)
    bits = (
        np.zeros(size, f"<u{item}") if base is None else _bits(data, base.start, size, item).copy()
    )
    for delta in layers.deltas:
        delta.apply(name, bits)
    return bits.data.cast("B")


def _refused(where: Path | str, why: str) -> PolicyError:
    return PolicyError(f"{where} is not a usable delta: {why}", hint=AGAIN)
