"""Location of a run's log, as passed between processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.bus import open_bus
from dora_pipe.bus.blobs import BlobFiles, BlobStore
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.kafka.security import KafkaSecurity
from dora_pipe.config.model import Bus as BusSection
from dora_pipe.core.errors import BusError, BusFull, ResourceError
from dora_pipe.core.system.durable import TEMPORARY
from dora_pipe.store.files import BLOBS, Files

BLOB_ABOVE_BYTES: Final = 256 * 1024
"""Minimum size of values that go to the store."""


class LogLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Log and its blob store, without secrets."""

    run: str
    url: str
    """URL for `open_bus`."""
    bus: BusSection | None = None
    """Kafka access without secrets."""
    blobs: str = ""
    """Directory of large values or their cached copies; empty without blobs."""
    store_url: str = ""
    """URL of a remote store."""

    def open(self) -> Bus:
        """Open the log. Raises BusError, ConfigError for a missing secret or bad `store_url`."""
        security = None if self.bus is None else KafkaSecurity.of(self.bus)
        above = None if self.bus is None or self.store_url else BLOB_ABOVE_BYTES
        return open_bus(self.url, security, blobs=self.blob_store(), blob_above_bytes=above)

    def blob_store(self) -> BlobStore | None:
        """Return the blob store. Raises ConfigError."""
        if not self.blobs:
            return None
        if not self.store_url:
            unsynced = self.bus is not None and not self.bus.blob_fsync
            synced = not (unsynced and self.url.startswith("kafka:"))
            return BlobFiles(Path(self.blobs), synced=synced)
        from dora_pipe.store.arrow_files import open_files

        return SharedBlobs(open_files(self.store_url, folder=self.run), Path(self.blobs))


class SharedBlobs:
    """`BlobStore` on a store's file system; `folder` is for unfinished copies."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._files = files
        self._folder = folder

    def write(self, digest: str, value: bytes) -> None:
        """Store a value durably. Raises BusFull."""
        try:
            with _unfinished(self._folder) as partial:
                source = partial / digest
                source.write_bytes(value)
                self._files.put(source, _name(digest))
        except (ResourceError, OSError) as error:
            raise BusFull(
                f"a value of {len(value)} bytes cannot be kept in {self._files.where}: {error}"
            ) from error

    def read(self, digest: str, size_bytes: int) -> bytes | None:
        try:
            with _unfinished(self._folder) as partial:
                target = partial / digest
                if not self._files.get(_name(digest), target):
                    return None
                return target.read_bytes() if target.stat().st_size == size_bytes else None
        except (ResourceError, OSError) as error:
            raise BusError(f"cannot read a blob in {self._files.where}: {error}") from error


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as name:
        yield Path(name)


def _name(digest: str) -> str:
    return f"{BLOBS}/{digest}"
