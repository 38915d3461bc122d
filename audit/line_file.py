"""A file of JSON lines that a command adds to and goes on with; decides what of it counts.

A line that was being written when somebody ended the process is no line: whoever reads leaves it
out, and whoever adds cuts it off.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from dora_pipe.core.errors import ResourceError, UsageError

Line = TypeVar("Line")


def read_lines(path: Path, kind: type[Line], *, hint: str) -> list[Line]:
    """The whole lines of a file; none where there is none, and somebody may be writing it.

    Raises UsageError with `hint` for one that is not of this kind, ResourceError.
    """
    try:
        return list(_lines(path, kind, hint))
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror or error}") from error


def append_lines(path: Path) -> IO[bytes]:
    """The file, unbuffered, for lines of `line_of`, behind its last whole one. Raises
    ResourceError."""
    try:
        _cut(path)
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror or error}") from error


def line_of(one: msgspec.Struct) -> bytes:
    return msgspec.json.encode(one) + b"\n"


def write_whole(path: Path, value: msgspec.Struct) -> None:
    """Write one value as a file of its own, all or nothing. Raises OSError."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(value)) + b"\n")
    partial.replace(path)


def _lines(path: Path, kind: type[Line], hint: str) -> Iterator[Line]:
    if not path.is_file():
        return
    decode = msgspec.json.Decoder(kind).decode
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                yield decode(line)
            except msgspec.DecodeError as error:
                raise UsageError(f"{path}, line {number}: {error}", hint=hint) from None


def _cut(path: Path) -> None:
    """Take away what stands behind the last whole line."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        whole = text.rfind(b"\n") + 1
    os.truncate(path, whole)
