"""Files that survive a power loss, and how a file system says that it is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of an OSError that mean: there is no room."""


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
