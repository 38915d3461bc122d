"""Local copies of versions: eviction, least recently used first, and substitutes for lost files."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Collection
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from dora_pipe.core.errors import PolicyError
from dora_pipe.core.system.clock import Clock
from dora_pipe.core.system.durable import sync
from dora_pipe.schemas.policy import Fallback
from dora_pipe.store.verified import SUFFIX, unlink_noted

LOG = logging.getLogger(__name__)

KEEP_S: Final = 600.0
"""Time that a used copy remains, because another process may open it."""

CACHED: Final = ("contributions", "optimizer", "deltas", "weights")
"""Folders bounded in the cache of a remote store. Config and tokenizer files are small and never
removed."""

FALLBACKS_MAX: Final = 8

MADE: Final = "made"
"""Folder bounded in a local store."""


def touch(path: Path, clock: Clock) -> None:
    """Mark a copy as used; keep its mtime."""
    os.utime(path, ns=(clock.wall_ns(), path.stat().st_mtime_ns))


def shrink(
    root: Path, bytes_max: int, clock: Clock, folders: Collection[str] = CACHED
) -> list[Path]:
    """Remove copies until the rest fits; return them. Safe across processes."""
    copies: list[tuple[int, int, Path]] = []
    for folder in folders:
        for path in (root / folder).glob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix != SUFFIX:
                copies.append((stat.st_atime_ns, stat.st_size, path))
    total = sum(size for _, size, _ in copies)
    youngest_ns = clock.wall_ns() - int(KEEP_S * 1e9)
    removed: list[Path] = []
    for used_ns, size, path in sorted(copies):
        if total <= bytes_max or used_ns > youngest_ns:
            break
        unlink_noted(path)
        removed.append(path)
        total -= size
    return removed


def place(path: Path, final: Path) -> None:
    """Rename a finished directory, unless another process has."""
    sync(path)
    if not final.is_dir():
        path.replace(final)
    sync(final.parent)


class Fallbacks:
    """Lost or damaged files and their substitutes since the last `take`, for `worker ready` and
    `step committed`.

    Example: ``store.weights(digest)``, then ``store.fallbacks.take()``
    """

    def __init__(self) -> None:
        self._noted: deque[Fallback] = deque(maxlen=FALLBACKS_MAX)
        self._fetched = 0

    def fetched(self, path: Path) -> None:
        self._fetched += path.stat().st_size

    def note(self, digest: str, error: PolicyError, taken: str, *, absent: bool = False) -> None:
        """Record that `taken` replaces an unavailable file."""
        LOG.warning("version %s...: %s; %s is taken", digest[:12], error.message, taken)
        fetched = -self._fetched  # later fetches are added
        self._noted.append(
            Fallback(digest=digest, reason=error.message, taken=taken, bytes=fetched, absent=absent)
        )

    def take(self) -> tuple[Fallback, ...]:
        """Return and clear the entries, with the bytes fetched since each."""
        noted, self._noted = self._noted, deque(maxlen=FALLBACKS_MAX)
        return tuple(replace(fallback, bytes=fallback.bytes + self._fetched) for fallback in noted)
