"""Small file system in memory that a test can fill."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PIECE_BYTES = 4096
MOUNT_S = 60


def _mount(*words: str) -> bool:
    done = subprocess.run(words, capture_output=True, timeout=MOUNT_S, check=False)
    return done.returncode == 0


class SmallDisk:
    """Disk of `size_mib`; `fill` uses all space, `make_room` frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / ".ballast"

    def fill(self, *, but_bytes: int = 0) -> None:
        free = os.statvfs(self.path)
        take = free.f_bavail * free.f_frsize - but_bytes
        piece = bytes(PIECE_BYTES)
        with self._ballast.open("ab", buffering=0) as file:
            try:
                for _ in range(max(0, take) // PIECE_BYTES):
                    file.write(piece)
            except OSError:
                assert not but_bytes, "somebody else takes room too"

    def make_room(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def grow(self, size_mib: int) -> None:
        assert _mount("mount", "-o", f"remount,size={size_mib}m", str(self.path))


@contextmanager
def small_disk(path: Path, size_mib: int) -> Iterator[SmallDisk]:
    """Mount it at `path` in the block; skip the test without permission."""
    path.mkdir(parents=True)
    size = f"size={size_mib}m"
    if os.geteuid() != 0 or not _mount("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(path)):
        pytest.skip("a small disk can only be mounted by root")
    try:
        yield SmallDisk(path)
    finally:
        _mount("umount", "--lazy", str(path))
