"""Blobs in the memory of one process, for tests; it keeps every promise of the port."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dora_pipe.clock import Clock
from dora_pipe.schemas.policy import Blob
from dora_pipe.transfers.port import (
    AGE_MAX_NS,
    BLOB_BYTES_MAX,
    GONE,
    LATE,
    NO_ROOM,
    OTHER_DIGEST,
    PLACE_BYTES_MAX,
    TOO_LARGE,
    Array,
    Lost,
    misnamed,
)


@dataclass(slots=True)
class MemoryTransfers:
    """Shared by all that are said to run on one machine.

    Example: ``MemoryTransfers(SystemClock())``
    """

    clock: Clock
    bytes_max: int = PLACE_BYTES_MAX
    kept: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """By digest: when it was offered (ns), and its bytes; a test may change what it likes."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        """Nobody from outside gets in."""
        return ""

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        """See `Transfers`."""
        data = b"".join(chunks)
        if len(data) > BLOB_BYTES_MAX:
            return Lost(TOO_LARGE)
        now_ns = self.clock.wall_ns()
        blob = Blob(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        with self.lock:
            for name, (at_ns, _) in list(self.kept.items()):
                if at_ns < now_ns - AGE_MAX_NS:
                    del self.kept[name]
            if sum(len(one) for _, one in self.kept.values()) + len(data) > self.bytes_max:
                return Lost(NO_ROOM)
            self.kept[blob.sha256] = (now_ns, data)
        return blob

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        """See `Transfers`."""
        if (wrong := misnamed(blob)) is not None:
            return wrong
        if timeout_s <= 0:
            return Lost(LATE)
        with self.lock:
            if blob.sha256 not in self.kept:
                return Lost(GONE)
            data = self.kept[blob.sha256][1]
        if len(data) != blob.bytes or hashlib.sha256(data).hexdigest() != blob.sha256:
            self.drop(blob)
            return Lost(OTHER_DIGEST)
        return np.frombuffer(data, np.uint8).copy()

    def drop(self, blob: Blob) -> None:
        """See `Transfers`."""
        with self.lock:
            self.kept.pop(blob.sha256, None)

    def clear(self) -> None:
        """See `Transfers`."""
        with self.lock:
            self.kept.clear()

    def close(self) -> None:
        """There is nothing to stop."""
