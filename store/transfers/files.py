"""Blobs in ``<run>/handover/<sha256>.safetensors``, shared by the processes of a machine.

Files are not synced: a lost cache is prefilled again. Readers use memory maps, so a file may be
deleted after the fetch; leftovers older than `AGE_MAX_NS` go with the next offer.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from dora_pipe.core.system.clock import Clock
from dora_pipe.core.system.durable import TEMPORARY
from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.transfers import (
    AGE_MAX_NS,
    BLOB_BYTES_MAX,
    GONE,
    LATE,
    NO_ROOM,
    OTHER_DIGEST,
    PLACE_BYTES_MAX,
    TOO_LARGE,
    UNREADABLE,
    Array,
    Lost,
    misnamed,
)

SUFFIX: Final = ".safetensors"
OWNER_ONLY: Final = 0o700
"""KV caches reveal what policies generate."""

_COUNTER = itertools.count()


class MappedFiles:
    """Blobs in a directory, created by the first offer; thread-safe, may block."""

    address = ""
    """Address for other machines, empty without one."""
    peers: Callable[[str, Path], bool] | None = None
    """Writer of a policy store's file from peers, if any (`PolicyStore`)."""

    def __init__(self, root: Path, *, clock: Clock, bytes_max: int = PLACE_BYTES_MAX) -> None:
        self._root = root
        self._clock = clock
        self._bytes_max = bytes_max

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        """Store the concatenated chunks."""
        size = sum(chunk.nbytes for chunk in chunks)
        if size > BLOB_BYTES_MAX:
            return Lost(TOO_LARGE)
        try:
            self._root.mkdir(mode=OWNER_ONLY, parents=True, exist_ok=True)
            if self._used_bytes() + size > self._bytes_max:
                return Lost(NO_ROOM)
            return self._written(chunks, size)
        except OSError:
            return Lost(NO_ROOM)

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        """Return the verified bytes as writable uint8 [bytes]; delete a file of another digest."""
        if (wrong := misnamed(blob)) is not None:
            return wrong
        if timeout_s <= 0:
            return Lost(LATE)
        path = self.path(blob)
        try:
            if path.stat().st_size != blob.bytes:
                return self._damaged(path)
            # Copy-on-write: torch rejects read-only arrays.
            data = np.memmap(path, np.uint8, mode="c")
            if hashlib.sha256(data.data).hexdigest() != blob.sha256:
                return self._damaged(path)
        except FileNotFoundError:
            return Lost(GONE)
        except (OSError, ValueError):
            return Lost(UNREADABLE)
        return data

    def drop(self, blob: Blob) -> None:
        """Delete the file; existing maps remain valid."""
        if misnamed(blob) is None:
            _delete(self.path(blob))

    def clear(self) -> None:
        """Delete all blobs of the run on this machine."""
        shutil.rmtree(self._root, ignore_errors=True)

    def close(self) -> None:
        """Stop serving; local blobs remain."""

    def path(self, blob: Blob) -> Path:
        return self._root / f"{blob.sha256}{SUFFIX}"

    def _written(self, chunks: Sequence[memoryview], size: int) -> Blob:
        partial = self._root / f"{TEMPORARY}{os.getpid()}-{next(_COUNTER)}"
        digest = hashlib.sha256()
        try:
            with partial.open("wb") as file:
                for chunk in chunks:
                    digest.update(chunk)
                    file.write(chunk)
            blob = Blob(sha256=digest.hexdigest(), bytes=size)
            partial.replace(self.path(blob))
        finally:
            partial.unlink(missing_ok=True)
        return blob

    def _damaged(self, path: Path) -> Lost:
        _delete(path)
        return Lost(OTHER_DIGEST)

    def _used_bytes(self) -> int:
        used, oldest_ns = 0, self._clock.wall_ns() - AGE_MAX_NS
        for path in _files(self._root):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            if facts.st_mtime_ns < oldest_ns:
                _delete(path)
            else:
                used += facts.st_size
        return used


def _files(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        if path.suffix == SUFFIX or path.name.startswith(TEMPORARY):
            yield path


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # the next run clears it
