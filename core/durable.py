"""Files that survive a power loss, and how a file system says that it is full or read-only."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

from dora_pipe.core.errors import ResourceError

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of an OSError that mean: there is no room."""


def need_temporary_folder() -> None:
    """Raise ResourceError where no folder for temporary files can be written."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ResourceError(
            f"no temporary folder can be written: {error.strerror}",
            hint="set TMPDIR to a folder that can be written; in a container, to a mounted volume",
        ) from None


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
