"""Copies on this machine of what a policy store has, or can make: decides which leave it first.

Those used longest ago do. What was used within `KEEP_S` stays, whatever the bound says: another
process of this machine may be about to open it.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from dora_pipe.core.clock import Clock
from dora_pipe.core.durable import sync
from dora_pipe.store.verified import SUFFIX, unlink_noted

KEEP_S: Final = 600.0
"""A copy used within this time is not removed."""

CACHED: Final = ("contributions", "optimizer", "patches", "weights")
"""What is bounded; config and tokenizer files are small and stay."""

MADE: Final = "made"
"""What is bounded of a store that lies on this machine: copies that patches made."""


def touch(path: Path, clock: Clock) -> None:
    """Note that a copy is in use; its time of change stays."""
    os.utime(path, ns=(clock.wall_ns(), path.stat().st_mtime_ns))


def shrink(
    root: Path, bytes_max: int, clock: Clock, folders: Collection[str] = CACHED
) -> list[Path]:
    """Remove copies until the rest fits; which ones. Another process may do so at the same time."""
    found: list[tuple[int, int, Path]] = []
    for folder in folders:
        for path in (root / folder).glob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix != SUFFIX:
                found.append((stat.st_atime_ns, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    youngest_ns = clock.wall_ns() - int(KEEP_S * 1e9)
    removed: list[Path] = []
    for used_ns, size, path in sorted(found):
        if total <= bytes_max or used_ns > youngest_ns:
            break
        unlink_noted(path)
        removed.append(path)
        total -= size
    return removed


def place(path: Path, final: Path) -> None:
    """Give a finished directory its name, unless another process just has."""
    sync(path)
    if not final.is_dir():
        path.replace(final)
    sync(final.parent)
