"""Whole files written and read past the page cache; decides nothing.

What is written once and read once gains nothing from lying there: it costs a copy and new pages on
either side, and pushes out what is wanted again. Where a file system does not take that
(``O_DIRECT``), files are written and read as always; their bytes are the same.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

PIECE_BYTES: Final = 8 * 1024 * 1024
"""That are written or read at once."""

BLOCK_BYTES: Final = 4096
"""Places, sizes and memory are multiples of it: of no disk is more wanted."""

_DIRECT: Final = getattr(os, "O_DIRECT", 0)

# Idle ones, as many as threads were at work at once; popping and appending are atomic.
_BUFFERS: list[mmap.mmap] = []


def write_direct(path: Path, value: bytes, *, synced: bool) -> None:
    """Make a file of these bytes; `synced`: it is on the disk, its name is not. Raises OSError."""
    try:
        _write(path, value, _DIRECT, synced=synced)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        _write(path, value, 0, synced=synced)


def read_direct(path: Path, size_bytes: int) -> bytes | None:
    """What a file of that size holds; None of another size. Raises OSError."""
    try:
        return _read(path, size_bytes, _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        return _read(path, size_bytes, 0)


def _write(path: Path, value: bytes, flag: int, *, synced: bool) -> None:
    # A file system that refuses the flag may have made the file all the same.
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag) as handle, _buffer() as buffer:
        seen, whole = memoryview(value), _whole_blocks(len(value)) if flag else 0
        for at in range(0, whole, PIECE_BYTES):
            piece = seen[at : min(whole, at + PIECE_BYTES)]
            buffer[: len(piece)] = piece
            _write_all(handle, memoryview(buffer)[: len(piece)])
        _through_cache(handle)  # What fills no block.
        _write_all(handle, seen[whole:])
        if synced:
            os.fsync(handle)


def _write_all(handle: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(handle, piece) :]


def _read(path: Path, size_bytes: int, flag: int) -> bytes | None:
    pieces: list[bytes | memoryview] = []
    with _opened(path, os.O_RDONLY | flag) as handle, _buffer() as buffer:
        if os.fstat(handle).st_size != size_bytes:
            return None
        whole = _whole_blocks(size_bytes) if flag else 0
        for at in range(0, whole, PIECE_BYTES):
            pieces[-1:] = map(bytes, pieces[-1:])  # The buffer is wanted again.
            piece = memoryview(buffer)[: min(PIECE_BYTES, whole - at)]
            if os.readv(handle, [piece]) != len(piece):
                return None  # It has become shorter meanwhile.
            pieces.append(piece)
        _through_cache(handle)
        pieces.append(os.read(handle, size_bytes - whole))
        found = b"".join(pieces)
    return found if len(found) == size_bytes else None


def _whole_blocks(size_bytes: int) -> int:
    return size_bytes // BLOCK_BYTES * BLOCK_BYTES


def _through_cache(handle: int) -> None:
    """From here on as always. A block that is dirty there would make a direct reader wait."""
    fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~_DIRECT)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    handle = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _buffer() -> Iterator[mmap.mmap]:
    """Memory at the beginning of a page, for one piece."""
    try:
        buffer = _BUFFERS.pop()
    except IndexError:
        buffer = mmap.mmap(-1, PIECE_BYTES)
    yield buffer
    _BUFFERS.append(buffer)
