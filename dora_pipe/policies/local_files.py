"""The policy store's files in a directory of this machine; decides only how a file gets its name.

A file appears at once and stays: synced, renamed, the directory synced.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Final

from dora_pipe.errors import ResourceError
from dora_pipe.policies.port import Listed

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LocalFiles:
    """See `Files`. Opening one creates nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def put(self, source: Path, name: str) -> None:
        """See Files; `source` is moved, and must lie in the same file system."""
        final = self.root / name
        with io_errors(final.parent):
            final.parent.mkdir(parents=True, exist_ok=True)
            sync(source)
            source.replace(final)
            sync(final.parent)

    def get(self, name: str, target: Path) -> bool:
        """See Files; nothing is copied onto itself."""
        source = self.root / name
        if not source.is_file():
            return False
        if source != target:
            with io_errors(target.parent):
                shutil.copyfile(source, target)
        return True

    def exists(self, name: str) -> bool:
        """See Files."""
        return (self.root / name).is_file()

    def delete(self, name: str) -> bool:
        """See Files."""
        with io_errors(self.root):
            try:
                (self.root / name).unlink()
            except FileNotFoundError:
                return False
        return True

    def listed(self, folder: str) -> list[Listed]:
        """See Files."""
        found: list[Listed] = []
        for path in (self.root / folder).rglob("*"):
            with suppress(FileNotFoundError):  # It went while this looked.
                status = path.stat()
                if S_ISREG(status.st_mode):
                    name = path.relative_to(self.root).as_posix()
                    found.append(
                        Listed(name=name, bytes=status.st_size, modified_ns=status.st_mtime_ns)
                    )
        return sorted(found, key=lambda one: one.name)


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def io_errors(folder: Path) -> Iterator[None]:
    """An OSError of the block as a ResourceError of one line."""
    try:
        yield
    except OSError as error:
        raise resource_error(folder, error) from error


def resource_error(folder: Path, error: OSError) -> ResourceError:
    """A full disk says so; anything else says what it was."""
    if error.errno in _NO_ROOM:
        return ResourceError(
            f"no room left for a policy in {folder}",
            hint="free some space and start the run again with --resume; nothing is lost",
        )
    return ResourceError(f"cannot write a policy in {folder}: {error.strerror or error}")
