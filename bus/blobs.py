"""Blobs: values too large for the log, stored in ``<store>/blobs/<digest>``.

The writer stores the value, then appends an empty one with the headers ``blob`` (digest) and
``blob-bytes`` (size). The reader restores it; if that fails, the value stays empty and
``blob-lost`` has the reason. `prune` deletes unreferenced blobs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Final, Protocol
from uuid import uuid4

from msgspec import structs

from dora_pipe.bus.base import BusWrapper, ReaderWrapper
from dora_pipe.bus.bus import Bus, Reader, Writer
from dora_pipe.bus.checks import check_position, record_bytes
from dora_pipe.core.errors import BusError, BusFull, RecordTooLarge
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.core.system.durable import sync
from dora_pipe.schemas.wire import DIGEST, digest_as, value_digest

BLOB: Final = "blob"
BLOB_BYTES: Final = "blob-bytes"
BLOB_LOST: Final = "blob-lost"

BLOB_BYTES_MAX: Final = 1 << 30
BLOB_TOPICS: Final = ("trajectories", "progress", "dead-letters")
"""Last name parts of topics that may use blobs."""

_HEADERS: Final = (BLOB, BLOB_BYTES, BLOB_LOST)
_NAME: Final = itemgetter(0)

_log = logging.getLogger(__name__)


class BlobStore(Protocol):
    """Storage of blobs."""

    def write(self, digest: str, value: bytes) -> None:
        """Store a value durably unless it exists. Raises BusFull."""
        ...

    def read(self, digest: str, size_bytes: int) -> bytes | None:
        """Return the value, or None if missing. Raises BusError."""
        ...


class BlobFiles(BlobStore):
    """Blobs as files; if `synced` they survive a power loss, else only process crashes."""

    def __init__(self, folder: Path, *, synced: bool = True) -> None:
        self.folder = folder
        self.synced = synced

    def write(self, digest: str, value: bytes) -> None:
        path = self.folder / digest
        with suppress(OSError):
            if path.stat().st_size == len(value):
                os.utime(path)
                return
        partial = self.folder / f".{digest}.{uuid4().hex}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(value)
                if self.synced:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(path)
            if self.synced:
                sync(self.folder)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise BusFull(
                f"a value of {len(value)} bytes cannot be kept in {self.folder}: {error.strerror}",
                hint="check the free space and the permissions of this process",
            ) from error

    def read(self, digest: str, size_bytes: int) -> bytes | None:
        try:
            with (self.folder / digest).open("rb") as file:
                if os.fstat(file.fileno()).st_size != size_bytes:
                    return None
                return file.read(size_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BusError(f"a blob in {self.folder} cannot be read: {error.strerror}") from error


def blob_of(record: Record) -> str:
    """Return the blob's digest, empty without one."""
    blob = _blob(record)
    return blob[0] if blob else ""


def may_be_blob(topic: str) -> bool:
    """Return whether a topic may use blobs."""
    return topic.rpartition(".")[2] in BLOB_TOPICS


class BlobBus(BusWrapper):
    """Bus that stores large values as blobs, and all values above `above_bytes`."""

    def __init__(
        self,
        bus: Bus,
        store: BlobStore,
        *,
        eligible: Callable[[str], bool] = may_be_blob,
        above_bytes: int | None = None,
        bytes_max: int = BLOB_BYTES_MAX,
    ) -> None:
        super().__init__(bus)
        self.store = store
        self.eligible = eligible
        self.above_bytes = above_bytes
        self.bytes_max = bytes_max

    def reader(self, positions: Mapping[TopicPartition, int]) -> BlobReader:
        return BlobReader(self, self.inner.reader(positions))

    def writer(self, *, exclusive: str | None = None) -> BlobWriter:
        return BlobWriter(self, self.inner.writer(exclusive=exclusive))


class BlobWriter(Writer):
    """Writer that stores values above a topic's limit, which it learns from rejections."""

    def __init__(self, bus: BlobBus, inner: Writer) -> None:
        self.inner = inner
        self._bus = bus
        self._limits: dict[str, int] = {}

    def append(self, records: Sequence[Append]) -> list[int]:
        while True:
            try:
                return self.inner.append([self._kept(record) for record in records])
            except RecordTooLarge as error:
                limit, known_limit = error.limit_bytes, self._limits.get(error.topic, sys.maxsize)
                if limit is None or limit >= known_limit or not self._bus.eligible(error.topic):
                    raise
                self._limits[error.topic] = limit

    def _large(self, record: Append) -> bool:
        if not self._bus.eligible(record.topic):
            return False
        limit, above = self._limits.get(record.topic), self._bus.above_bytes
        fits = limit is None or record_bytes(record) <= limit
        return not fits or (above is not None and len(record.value) > above)

    def _kept(self, record: Append) -> Append:
        if not self._large(record):
            return record
        if len(record.value) > self._bus.bytes_max:
            raise RecordTooLarge(
                f"a value of {len(record.value)} bytes for topic {record.topic}: "
                f"at most {self._bus.bytes_max} are stored outside the log"
            )
        digest = record.digest or value_digest(record.value)
        self._bus.store.write(digest, record.value)
        size = str(len(record.value)).encode()
        blob = ((BLOB, digest.encode()), (BLOB_BYTES, size))
        return structs.replace(record, value=b"", headers=(*record.headers, *blob))

    def close(self) -> None:
        self.inner.close()


class BlobReader(ReaderWrapper):
    """Reader that restores blob values within the byte bound of a poll."""

    def __init__(self, bus: BlobBus, inner: Reader) -> None:
        super().__init__(inner)
        self._bus = bus
        self._waiting: deque[Record] = deque()  # read, but above the last bound

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        if not self._waiting:
            self._waiting.extend(
                self.inner.poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
            )
        records: list[Record] = []
        try:
            while self._waiting and len(records) < records_max:
                bytes_max -= record_bytes(self._waiting[0]) + blob_bytes(self._waiting[0])
                if records and bytes_max < 0:
                    break
                records.append(self._restored(self._waiting[0]))
                self._waiting.popleft()
        except BusError:
            if not records:
                raise
        return records

    def _restored(self, record: Record) -> Record:
        blob = _blob(record)
        if blob is None:
            return record
        digest, size_bytes = blob
        if size_bytes > self._bus.bytes_max:
            return _lost(record, f"{size_bytes} bytes exceed the limit")
        value = self._bus.store.read(digest, size_bytes)
        if value is None:
            return _lost(record, "the store has no such value")
        if digest_as(digest, value) != digest:
            return _lost(record, "the stored value has another digest")
        kept = tuple(header for header in record.headers if header[0] not in _HEADERS)
        return replace(record, value=value, headers=kept, checked=digest)

    def position(self, tp: TopicPartition) -> int:
        reached = self.inner.position(tp)
        return next((entry.offset for entry in self._waiting if entry.at == tp), reached)

    def seek(self, tp: TopicPartition, position: int) -> None:
        check_position(tp, position)
        self.inner.seek(tp, position)
        self._waiting = deque(entry for entry in self._waiting if entry.at != tp)


def blob_bytes(record: Record) -> int:
    """Return the blob's size, 0 without one."""
    blob = _blob(record)
    return blob[1] if blob else 0


def lost_blob(record: Record) -> str:
    """Return why the blob is lost, empty if it is not."""
    if BLOB_LOST not in map(_NAME, record.headers):
        return ""
    headers = dict(record.headers)
    digest = headers.get(BLOB, b"?").decode(errors="replace")
    return f"blob {digest}: {headers[BLOB_LOST].decode(errors='replace')}"


def _blob(record: Record) -> tuple[str, int] | None:
    if record.value or not record.headers:
        return None
    headers = dict(record.headers)
    digest = headers.get(BLOB, b"").decode(errors="replace")
    size = headers.get(BLOB_BYTES, b"")
    if not DIGEST.fullmatch(digest) or not size.isdigit() or len(size) > len(str(1 << 62)):
        return None
    return digest, int(size)


def _lost(record: Record, why: str) -> Record:
    digest = dict(record.headers)[BLOB].decode()
    _log.warning(
        "%s/%d@%d: blob %s: %s", record.topic, record.partition, record.offset, digest, why
    )
    return replace(record, value=b"", headers=(*record.headers, (BLOB_LOST, why.encode())))
