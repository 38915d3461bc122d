"""A version that is being written, for those who want its bytes before the last is there; decides
what of a file may be read already.

The trainer writes a version's file from its beginning to its end, and its header says how long it
will be. So whoever opened it reads what is there and waits for the rest; it may be renamed
meanwhile. Nothing is promised of these bytes: they have no name yet, and may never get one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.safetensors_file import declared_bytes

PIECE_BYTES: Final = 4 * 1024 * 1024

GROWS_S: Final = 60.0
"""A file that does not grow for so long will not."""

POLL_S: Final = 0.01


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What is being written. Example: ``Written(name=".tmp-12-3", bytes=51405752)``"""

    name: str = ""
    """Of the unfinished file; empty: there is none."""
    bytes: int = 0
    digest: str = ""
    """Of its weights (hex), as soon as all of them are written."""


def written_of(data: bytes) -> Written | None:
    """What a peer says in JSON that it writes; None where that is nothing of the kind."""
    try:
        return msgspec.json.decode(data, type=Written)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class Coming:
    """The version that this process writes; any thread may ask.

    Example: ``store.publish_weights(partial(coming.write, learner.save_weights))``
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._whole: Written | None = None

    def write(self, write: Callable[[Path], Manifest], path: Path) -> Manifest:
        """Let a file be written, to be followed meanwhile. Raises what `write` does."""
        with self._lock:
            self._path, self._whole = path, None
        manifest = write(path)
        whole = Written(name=path.name, bytes=path.stat().st_size, digest=manifest.digest)
        with self._lock:
            self._whole = whole
        return manifest

    def written(self) -> Written:
        """What can be followed; nothing while the file has no header, and where it was given up."""
        with self._lock:
            path, whole = self._path, self._whole
        try:
            if path is not None and whole is None:
                return Written(name=path.name, bytes=declared_bytes(path))
        except (OSError, PolicyError):
            pass
        return whole or Written()

    def opened(self, name: str) -> tuple[BinaryIO, int]:
        """The file of this name, to be followed, and how long it will be. Raises OSError where it
        is none of the one that is written, or was written last."""
        written = self.written()
        with self._lock:
            path = self._path
        if path is None or not path.name == name == written.name:
            raise FileNotFoundError(name)
        try:
            return path.open("rb"), written.bytes
        except FileNotFoundError:  # it has its name
            return path.with_name(f"{written.digest}.safetensors").open("rb"), written.bytes


def followed(file: BinaryIO, size: int, *, grows_s: float = GROWS_S) -> Iterator[bytes]:
    """Piece by piece the bytes of a file that will have `size`, as they are written.

    It ends early where the file was given up or does not grow for `grows_s`: who reads counts.
    """
    at, until_s = 0, time.monotonic() + grows_s
    while at < size:
        gone = os.fstat(file.fileno()).st_nlink == 0  # asked first: what is read then is the rest
        piece = file.read(min(PIECE_BYTES, size - at))
        if piece:
            at, until_s = at + len(piece), time.monotonic() + grows_s
            yield piece
        elif gone or time.monotonic() > until_s:
            return
        else:
            time.sleep(POLL_S)
