"""Values too large for the log, where the policy store lies elsewhere; it decides only their names.

They are kept by the store's file system as ``claims/<sha256>``, so that every machine of a run
reads them; nothing of them stays on this machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dora_pipe.errors import BusError, BusFull, ResourceError
from dora_pipe.policies.port import CLAIMS, TEMPORARY, Files


class SharedClaims:
    """The `ClaimStore` of the log over a store's file system; `folder` is for unfinished copies."""

    def __init__(self, files: Files, folder: Path) -> None:
        self._files = files
        self._folder = folder

    def write(self, digest: str, value: bytes) -> None:
        """Keep a value durably under its digest. Raises BusFull, which is tried again."""
        try:
            with _unfinished(self._folder) as partial:
                source = partial / digest
                source.write_bytes(value)
                self._files.put(source, _name(digest))
        except (ResourceError, OSError) as error:
            raise BusFull(
                f"a value of {len(value)} bytes cannot be kept in {self._files.where}: {error}"
            ) from error

    def read(self, digest: str, size_bytes: int) -> bytes | None:
        """The value of that digest and size, or None where there is none such. Raises BusError."""
        try:
            with _unfinished(self._folder) as partial:
                target = partial / digest
                if not self._files.get(_name(digest), target):
                    return None
                return target.read_bytes() if target.stat().st_size == size_bytes else None
        except (ResourceError, OSError) as error:
            raise BusError(
                f"a claimed value in {self._files.where} cannot be read: {error}"
            ) from error


@contextmanager
def _unfinished(folder: Path) -> Iterator[Path]:
    """A folder for one copy, gone afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as name:
        yield Path(name)


def _name(digest: str) -> str:
    return f"{CLAIMS}/{digest}"
