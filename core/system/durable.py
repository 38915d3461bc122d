"""Durable files, and detection of full or read-only disks."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

from dora_pipe.core.errors import ResourceError

TEMPORARY: Final = ".tmp-"
"""Prefix of unfinished files."""

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errno values for no space."""


def need_temporary_folder() -> None:
    """Raises ResourceError without a writable temporary directory."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ResourceError(
            f"no writable temporary folder: {error.strerror}",
            hint="set TMPDIR to a folder that can be written; in a container, to a mounted volume",
        ) from None


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that readers see complete or not at all, without sync. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{TEMPORARY}{os.getpid()}-{path.name}")
    partial.write_bytes(content)
    partial.replace(path)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a directory. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
