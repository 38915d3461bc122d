"""KV caches of a vLLM server's requests, seen from its worker.

The server fills the file of an exported cache. The file of an imported one is kept until its
request's first event; ENDED_EARLY_MAX bounds those of requests that leave earlier.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import numpy as np

from dora_pipe.core.errors import ResourceError, reason
from dora_pipe.producers.engines.engine import Kv
from dora_pipe.producers.engines.vllm.client import VllmServerClient
from dora_pipe.producers.engines.vllm.kv_files import MARK, opened
from dora_pipe.producers.engines.vllm.wire import KV_COPIED, KV_ENDED

NO_ROOM: Final = "not enough disk space for it"
"""Rejection besides those of `kv_mismatch`."""

ENDED: Final = "ended"
"""The request has ended in the server; its last tokens will follow."""

SPARE_BYTES: Final = 1 << 26
"""Disk space to leave free."""

ENDED_EARLY_MAX: Final = 64
"""Files of requests that left early; the oldest are evicted."""


class RemoteCaches:
    """KV caches of a server, by attempt.

    Example: ``path = caches.offer("3f-1", kv)``, then `attempt_started` or `attempt_ended`.
    """

    def __init__(self, server: VllmServerClient) -> None:
        """Raises ResourceError if no temporary folder can be created."""
        mark = secrets.token_hex(16)
        with _files():
            self._folder = Path(tempfile.mkdtemp(prefix="dora-pipe-kv-"))
            self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            (self._folder / MARK).write_text(mark)
        self._server = server
        self._offered: dict[str, Kv] = {}
        """Imported caches until the first event."""
        self._ended_early: deque[str] = deque()
        self._copies = 0
        self.facts = server.caches(str(self._folder), mark)

    def has_room(self, kv: Kv) -> bool:
        return shutil.disk_usage(self._folder).free > kv.bytes + SPARE_BYTES

    def offer(self, attempt: str, kv: Kv) -> str:
        """Write an attempt's file. Raises ResourceError."""
        path = self._path(attempt)
        with _files():
            np.save(path, kv.array, allow_pickle=False)
        self._offered[attempt] = kv
        return str(path)

    def attempt_started(self, attempt: str) -> None:
        if self._offered.pop(attempt, None) is not None:
            self._path(attempt).unlink(missing_ok=True)

    def attempt_ended(self, attempt: str) -> None:
        if self._offered.pop(attempt, None) is not None:
            self._ended_early.append(attempt)
        while len(self._ended_early) > ENDED_EARLY_MAX:
            self._path(self._ended_early.popleft()).unlink(missing_ok=True)

    def copied(self, attempt: str, tokens: int, weights: str) -> Kv | Literal["ended"] | None:
        """Copy first positions; None if incomplete or `tokens` is 0, `ended` after its end. Raises
        ResourceError."""
        if attempt in self._offered:
            return self._offered[attempt]
        if not self.facts.layout or not tokens:
            return None
        self._copies += 1
        path, shape = self._path(f"copy-{self._copies}"), self.facts.shape(tokens)
        with _files():
            np.lib.format.open_memmap(
                path, mode="w+", dtype=np.dtype(self.facts.dtype), shape=shape
            )
        try:
            states = self._server.copy_cache(attempt, str(path))
            if KV_ENDED in states:
                return ENDED
            with _files():
                array = opened(path) if states == {KV_COPIED} else None
        finally:
            path.unlink(missing_ok=True)  # a mapped file stays readable
        return None if array is None else self.facts.kv(array, weights)

    def close(self) -> None:
        self._remove()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.npy"


@contextmanager
def _files() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise ResourceError(f"a KV cache for vLLM's server: {reason(error)}") from None
