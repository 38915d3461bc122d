"""Rows as one memory-mapped file of JSON lines.

    lines | padding | offsets, 8 bytes each, one more than rows | footer, JSON | its length, 8 bytes

The digest is sha256 over the canonical JSON of every row (`registry.rows_digest`), equal in every
format. Arrow would force rows with different columns into one schema.
"""

from __future__ import annotations

import hashlib
import mmap
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, overload

import msgspec

from dora_pipe.core.errors import TaskError
from dora_pipe.schemas.wire import canonical

_WORD: Final = 8
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(dict[str, Any])


class RowsFooter(msgspec.Struct, frozen=True, kw_only=True):
    """Footer of a row file."""

    rows: int
    offsets_at: int
    digest: str


class TooManyBytes(Exception):
    """Rows exceed the byte limit."""


class DataRows(Sequence[Mapping[str, Any]]):
    """Rows of a data set, decoded one at a time; `digest` needs no reading. Every row is a new
    object."""

    def __init__(self, buffer: bytes | mmap.mmap) -> None:
        """Raises TaskError for bytes in another format."""
        view = memoryview(buffer)
        try:
            length = int.from_bytes(view[-_WORD:], "little")
            footer = msgspec.json.decode(view[-_WORD - length : -_WORD], type=RowsFooter)
            end = footer.offsets_at + (footer.rows + 1) * _WORD
            self._offsets = view[footer.offsets_at : end].cast("Q")
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise TaskError(f"no file of rows: {error}") from error
        self._view = view
        self._rows = footer.rows
        self.digest: str = footer.digest

    @classmethod
    def mapped(cls, path: Path) -> DataRows:
        """Map a file; processes share its pages. Raises OSError."""
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        buffer.madvise(mmap.MADV_RANDOM)  # shuffled access
        return cls(buffer)

    def __len__(self) -> int:
        return self._rows

    @overload
    def __getitem__(self, index: int) -> Mapping[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[Mapping[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        if isinstance(index, slice):
            return [self[index] for index in range(*index.indices(self._rows))]
        position = index + self._rows if index < 0 else index
        if not 0 <= position < self._rows:
            raise IndexError(f"row {index} of {self._rows}")
        return _DECODER.decode(self._view[self._offsets[position] : self._offsets[position + 1]])

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return (self[index] for index in range(self._rows))


def write_rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]], file: IO[bytes], *, bytes_max: int | None = None
) -> RowsFooter:
    """Write rows, offsets and footer; row positions are for messages. Raises TaskError for a row
    that is not plain JSON, TooManyBytes beyond `bytes_max`."""
    digest, offsets, size = hashlib.sha256(), array("Q", [0]), 0
    for location, row in rows:
        try:
            digest.update(canonical(row))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise TaskError(f"{location}: not plain JSON: {error}") from error
        digest.update(b"\n")
        line = _ENCODER.encode(row) + b"\n"
        size += len(line)
        if bytes_max is not None and size > bytes_max:
            raise TooManyBytes
        file.write(line)
        offsets.append(size)
    padding = -size % _WORD
    file.write(b"\0" * padding)
    file.write(offsets.tobytes())
    footer = RowsFooter(rows=len(offsets) - 1, offsets_at=size + padding, digest=digest.hexdigest())
    encoded = msgspec.json.encode(footer)
    file.write(encoded + len(encoded).to_bytes(_WORD, "little"))
    return footer
