"""A cassette as a file: a line of JSON for every answer, appended as it comes; decides how it
survives who writes it.

Any number of task processes of a machine append to one file, each line whole and behind a lock.
Who is killed while writing leaves a line without an end: readers leave it out, the next writer cuts
it off. Two cassettes are one by `cat`. Of the answers only their places are in memory.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.core.errors import ConfigError, ResourceError
from dora_pipe.producers.tasks.cassette import Recorded

LINE_BYTES_MAX: Final = 1 << 25
"""Of one line: more than a task process may answer (`calls.FRAME_BYTES_MAX`)."""

TAIL_BYTES: Final = 1 << 16

_LENGTH_BITS: Final = 26
_DECODER: Final = msgspec.json.Decoder(Recorded)


class CassetteFile:
    """A file of recorded answers. May be used from several threads.

    Example: ``CassetteFile(Path("tools.jsonl")).found(key)``
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        """Without `writes` it has to be there. Raises ConfigError for what is no cassette,
        ResourceError where it cannot be read or written."""
        self.path = path
        self._lock = threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND if writes else os.O_RDONLY
        try:
            self._file = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            raise ConfigError(
                f"there is no cassette {path}",
                hint='task.cassette_mode = "record" makes one; export RUN --cassette FILE, too',
            ) from None
        except OSError as error:
            raise ResourceError(f"{path}: {error.strerror or error}") from error
        self._end = self._lines = 0
        self._places: dict[bytes, int | list[int]] = {}
        with ExitStack() as undo:
            undo.callback(os.close, self._file)
            self.refresh()
            undo.pop_all()

    def __len__(self) -> int:
        """Answers that it has, as far as they were read."""
        return self._lines

    def close(self) -> None:
        """No more to be asked."""
        os.close(self._file)

    def refresh(self) -> None:
        """Read what others have appended. Raises ConfigError, ResourceError."""
        with self._lock:
            self._read_on()

    def found(self, key: bytes) -> list[Recorded]:
        """The answers of a key, in the order in which they were recorded. Raises ConfigError."""
        with self._lock:
            places = self._places.get(key, ())
        return [self._at(one) for one in ((places,) if isinstance(places, int) else list(places))]

    def of_row(self, row: str) -> Iterator[Recorded]:
        """All answers of a row: the whole file is read for it."""
        part = f'"row":"{row}"'.encode()
        for _, line in self._whole_lines(0):
            if part in line:
                yield _DECODER.decode(line)

    def all(self) -> Iterator[Recorded]:
        """Every answer, in order."""
        for at, line in self._whole_lines(0):
            yield self._decoded(line, at)

    def append(self, one: Recorded) -> None:
        """Record an answer. Raises ResourceError."""
        line = msgspec.json.encode(one) + b"\n"  # an answer's maps keep their order: texts show it
        if len(line) > LINE_BYTES_MAX:
            raise ResourceError(f"{self.path}: an answer of {len(line)} bytes is not recorded")
        with self._lock:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
                try:
                    self._cut_torn_line()
                    _write(self._file, line)
                finally:
                    fcntl.flock(self._file, fcntl.LOCK_UN)
            except OSError as error:
                raise ResourceError(f"{self.path}: {error.strerror or error}") from error
            self._read_on()

    def _cut_torn_line(self) -> None:
        """Whoever has the lock finds no other writer at work: such a line has no end any more."""
        size = os.fstat(self._file).st_size
        end = size
        while end:
            start = max(0, end - TAIL_BYTES)
            newline = os.pread(self._file, end - start, start).rfind(b"\n")
            end = start + newline + 1 if newline >= 0 else start
            if newline >= 0:
                break
        if end < size:
            os.ftruncate(self._file, end)

    def _read_on(self) -> None:
        for at, line in self._whole_lines(self._end):
            self._lines += 1
            key, place = self._decoded(line, at).key, at << _LENGTH_BITS | len(line)
            there = self._places.get(key)
            if there is None:
                self._places[key] = place
            elif isinstance(there, int):
                self._places[key] = [there, place]
            else:
                there.append(place)
            self._end = at + len(line)

    def _whole_lines(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Each with where it begins; one without an end is left out."""
        try:
            if os.fstat(self._file).st_size <= start:
                return
            with self.path.open("rb") as lines:
                lines.seek(start)
                for line in lines:
                    if not line.endswith(b"\n"):
                        return
                    yield start, line
                    start += len(line)
        except OSError as error:
            raise ResourceError(f"{self.path}: {error.strerror or error}") from error

    def _at(self, place: int) -> Recorded:
        at = place >> _LENGTH_BITS
        return self._decoded(os.pread(self._file, place & ((1 << _LENGTH_BITS) - 1), at), at)

    def _decoded(self, line: bytes, at: int) -> Recorded:
        try:
            return _DECODER.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self.path}, at byte {at}: {error}",
                hint="a cassette has lines of JSON (docs/cassettes.md)",
            ) from None


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
