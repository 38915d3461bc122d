"""What a policy store asks of a file system, and how a directory of this machine answers.

Names are relative and have one folder: ``weights/<digest>.safetensors``. Nothing is ever written
twice under a name with other content, so whoever reads needs no lock; who doubts compares digests.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import Final, Protocol

from dora_pipe.core.durable import NO_ROOM, sync
from dora_pipe.core.errors import NoRoom, ResourceError

TEMPORARY: Final = ".tmp-"
"""How the name of an unfinished file begins."""

CLAIMS: Final = "claims"
"""Folder of the values that were too large for the log (see `bus.claim_check`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A file that is there. Example: ``Listed(name="weights/ab.safetensors", bytes=10)``"""

    name: str
    bytes: int
    modified_ns: int = field(default=0, compare=False)
    """By the clock of the file system, ns since 1970; 0 where it does not say."""


class Files(Protocol):
    """See the head of this file. Every method raises ResourceError when the file system is away."""

    where: str
    """The file system and folder, for people; without credentials."""

    def put(self, source: Path, name: str) -> None:
        """Make the bytes of a local file durable under a name, all at once or not at all.

        A file of that name is replaced: it may be damaged. `source` may be moved away.
        """
        ...

    def get(self, name: str, target: Path) -> bool:
        """Copy a file to a local path; False if there is none of that name."""
        ...

    def exists(self, name: str) -> bool: ...

    def delete(self, name: str) -> bool:
        """Remove a file; whether there was one."""
        ...

    def listed(self, folder: str) -> list[Listed]:
        """All files below a folder, unfinished ones among them, sorted; none if it is not there."""
        ...


_NO_ROOM_SAYS: Final = (
    "no space left",
    "storagefull",
    "quotaexceeded",
    "quota exceeded",
    "insufficient storage",
)
"""What stores elsewhere say in an error without a number, as they write it, in small letters."""


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
        return (self.root / name).is_file()

    def delete(self, name: str) -> bool:
        with io_errors(self.root):
            try:
                (self.root / name).unlink()
            except FileNotFoundError:
                return False
        return True

    def listed(self, folder: str) -> list[Listed]:
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


@contextmanager
def io_errors(folder: Path) -> Iterator[None]:
    """An OSError of the block as a ResourceError of one line."""
    try:
        yield
    except OSError as error:
        raise resource_error(folder, error) from error


def resource_error(folder: Path, error: OSError) -> ResourceError:
    """A full disk says so; anything else says what it was."""
    if is_no_room(error):
        return no_room(str(folder))
    return ResourceError(f"cannot write a policy in {folder}: {error.strerror or error}")


def is_no_room(error: OSError) -> bool:
    """Whether a file system, of this machine or elsewhere, is full."""
    if error.errno is not None:
        return error.errno in NO_ROOM
    said = str(error).lower()
    return any(sign in said for sign in _NO_ROOM_SAYS)


def no_room(where: str) -> NoRoom:
    """What is said of a store without room."""
    return NoRoom(
        f"no room left for a policy in {where}",
        hint="free some space and start the run again with --resume; nothing is lost",
    )
