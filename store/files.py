"""File system interface of a policy store, and its local implementation.

Content under a name never changes, so readers need no lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Final, Protocol

from dora_pipe.core.errors import NoRoom, ResourceError
from dora_pipe.core.system.durable import NO_ROOM, sync

BLOBS: Final = "blobs"
"""Values too large for the log (`bus.blobs`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """Existing file."""

    name: str
    bytes: int
    modified_ns: int = field(default=0, compare=False)
    """Unix time by the file system's clock; 0 if unknown."""


class Files(Protocol):
    """File system interface. Raises ResourceError if unreachable."""

    where: str
    """Name in messages, without credentials."""

    def put(self, source: Path, name: str) -> None:
        """Store a local file durably and atomically, replacing any; may move `source`."""
        ...

    def get(self, name: str, target: Path) -> bool:
        """Copy to a local path; return False if missing."""
        ...

    def exists(self, name: str) -> bool: ...

    def delete(self, name: str) -> bool:
        """Delete a file; return whether it existed."""
        ...

    def listed(self, folder: str) -> list[Listed]:
        """Return the sorted files of a folder, including unfinished ones."""
        ...


_NO_ROOM_SAYS: Final = (
    "no space left",
    "storagefull",
    "quotaexceeded",
    "quota exceeded",
    "insufficient storage",
)
"""Lowercase texts of disk-full errors without errno."""


class LocalFiles:
    """`Files` in a local directory; opening it creates nothing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.where = str(root)

    def put(self, source: Path, name: str) -> None:
        """Move `source`, which must be on the same file system."""
        final = self.root / name
        with io_errors(final.parent):
            final.parent.mkdir(parents=True, exist_ok=True)
            sync(source)
            source.replace(final)
            sync(final.parent)

    def get(self, name: str, target: Path) -> bool:
        """Copy, unless source and target are the same."""
        source = self.root / name
        if not source.is_file():
            return False
        if source != target:
            with io_errors(target.parent):
                shutil.copyfile(source, target)
        return True

    def exists(self, name: str) -> bool:
        return (self.root / name).is_file()

    def delete(self, name: str) -> bool:
        with io_errors(self.root):
            try:
                (self.root / name).unlink()
            except FileNotFoundError:
                return False
        return True

    def listed(self, folder: str) -> list[Listed]:
        files: list[Listed] = []
        for path in (self.root / folder).rglob("*"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                status = path.stat()
                if S_ISREG(status.st_mode):
                    name = path.relative_to(self.root).as_posix()
                    files.append(
                        Listed(name=name, bytes=status.st_size, modified_ns=status.st_mtime_ns)
                    )
        return sorted(files, key=lambda file: file.name)


@contextmanager
def io_errors(folder: Path) -> Iterator[None]:
    """Convert OSError into ResourceError."""
    try:
        yield
    except OSError as error:
        raise resource_error(folder, error) from error


def resource_error(folder: Path, error: OSError) -> ResourceError:
    """Return NoRoom for a full disk, else ResourceError."""
    if is_no_room(error):
        return no_room(str(folder))
    return ResourceError(f"cannot write a policy in {folder}: {error.strerror or error}")


def is_no_room(error: OSError) -> bool:
    """Return whether a local or remote file system is full."""
    if error.errno is not None:
        return error.errno in NO_ROOM
    text = str(error).lower()
    return any(sign in text for sign in _NO_ROOM_SAYS)


def no_room(where: str) -> NoRoom:
    """Return the error for a full store."""
    return NoRoom(
        f"no space left for a policy in {where}",
        hint="free some space and continue with --resume; no data is lost",
    )
