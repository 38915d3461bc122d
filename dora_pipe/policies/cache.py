"""Local copies of a policy store that lies elsewhere; decides which copies leave the disk.

The copies used longest ago go first. What was used within `KEEP_S` stays, whatever the bound says:
another process of this machine may be about to open it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from dora_pipe.clock import Clock

CACHE_BYTES_MAX: Final = 100 * 1024**3
"""Local copies beyond this are removed, unless the configuration says otherwise."""

KEEP_S: Final = 600.0
"""A copy used within this time is not removed."""

FOLDERS: Final = ("contributions", "optimizer", "weights")
"""What is bounded; config and tokenizer files are small and stay."""


def touch(path: Path, clock: Clock) -> None:
    """Note that a copy is in use."""
    now_ns = clock.wall_ns()
    os.utime(path, ns=(now_ns, now_ns))


def shrink(root: Path, bytes_max: int, clock: Clock) -> list[Path]:
    """Remove copies until the rest fits; which ones. Another process may do so at the same time."""
    found: list[tuple[int, int, Path]] = []
    for folder in FOLDERS:
        for path in (root / folder).glob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((stat.st_mtime_ns, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    youngest_ns = clock.wall_ns() - int(KEEP_S * 1e9)
    removed: list[Path] = []
    for used_ns, size, path in sorted(found):
        if total <= bytes_max or used_ns > youngest_ns:
            break
        path.unlink(missing_ok=True)
        removed.append(path)
        total -= size
    return removed
