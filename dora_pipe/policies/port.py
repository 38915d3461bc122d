"""What a policy store asks of a file system: whole files under names that never change meaning.

Names are relative and have one folder: ``weights/<digest>.safetensors``. Nothing is ever written
twice under a name with other content, so whoever reads needs no lock; who doubts compares digests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

TEMPORARY: Final = ".tmp-"
"""How the name of an unfinished file begins."""

CLAIMS: Final = "claims"
"""Folder of the values that were too large for the log (see `bus.claims`)."""


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

    def exists(self, name: str) -> bool:
        """Whether a file of that name is there."""
        ...

    def delete(self, name: str) -> bool:
        """Remove a file; whether there was one."""
        ...

    def listed(self, folder: str) -> list[Listed]:
        """All files below a folder, unfinished ones among them, sorted; none if it is not there."""
        ...
