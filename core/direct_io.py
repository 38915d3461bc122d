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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

PIECE_BYTES: Final = 8 * 1024 * 1024
"""That are written or read at once."""

BLOCK_BYTES: Final = 4096
"""Places, sizes and memory are multiples of it: of no disk is more wanted."""

T = TypeVar("T")

_DIRECT: Final = getattr(os, "O_DIRECT", 0)

# Idle ones, as many as threads were at work at once; popping and appending are atomic.
_BUFFERS: list[mmap.mmap] = []


def write_direct(path: Path, value: bytes, *, synced: bool) -> None:
    """Make a file of these bytes; `synced`: it is on the disk, its name is not. Raises OSError."""
    _past(lambda flag: _write(path, value, flag, synced=synced))


def read_direct(path: Path, size_bytes: int) -> bytes | None:
    """What a file of that size holds; None of another size. Raises OSError."""
    return _past(lambda flag: _read(path, size_bytes, flag))


def _past(work: Callable[[int], T]) -> T:
    """With the flag, or else without."""
    try:
        return work(_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL or not _DIRECT:
            raise
        return work(0)


def _write(path: Path, value: bytes, flag: int, *, synced: bool) -> None:
    # A file system that refuses the flag may have made the file all the same.
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flag) as handle, _buffer() as buffer:
        seen, whole = memoryview(value), len(value) // BLOCK_BYTES * BLOCK_BYTES if flag else 0
        for at in range(0, whole, PIECE_BYTES):
            piece = seen[at : min(whole, at + PIECE_BYTES)]
            buffer[: len(piece)] = piece
            _write_all(handle, memoryview(buffer)[: len(piece)])
        # What fills no block goes as always. One that is dirty there makes a direct reader wait.
        fcntl.fcntl(handle, fcntl.F_SETFL, fcntl.fcntl(handle, fcntl.F_GETFL) & ~flag)
        _write_all(handle, seen[whole:])
        if synced:
            os.fsync(handle)


def _write_all(handle: int, piece: memoryview) -> None:
    while piece:
        piece = piece[os.write(handle, piece) :]


def _read(path: Path, size_bytes: int, flag: int) -> bytes | None:
    pieces = []
    with _opened(path, os.O_RDONLY | flag) as handle, _buffer() as buffer:
        if os.fstat(handle).st_size != size_bytes:
            return None
        for at in range(0, size_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, size_bytes - at)
            piece = memoryview(buffer)[: size + -size % BLOCK_BYTES]
            if os.readv(handle, [piece]) != size:
                return None  # It has become shorter meanwhile.
            pieces.append(bytes(piece[:size]))
    return b"".join(pieces)


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
