"""Local copies of versions: eviction, least recently used first."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from dora_pipe.core.system.clock import Clock
from dora_pipe.core.system.durable import sync
from dora_pipe.store.verified import SUFFIX, unlink_noted

KEEP_S: Final = 600.0
"""Time that a used copy remains, because another process may open it."""

CACHED: Final = ("contributions", "optimizer", "deltas", "weights")
"""Folders bounded in the cache of a remote store. Config and tokenizer files are small and never
removed."""

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
