"""Interface of transfers between processes.

Transfers only save time, so failures return `Lost` with a fixed reason that metrics count. Blobs
are named by digest; `Blob.peer` is the address for other machines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from dora_pipe.schemas.policy import Blob

Array = np.ndarray[Any, np.dtype[Any]]

BLOB_BYTES_MAX: Final = 2 * 1024**3 + 64 * 1024
"""Maximum size; recomputing larger ones is faster."""

PLACE_BYTES_MAX: Final = 16 * 1024**3
"""Maximum bytes per machine."""

AGE_MAX_NS: Final = 600_000_000_000
"""Age after which unfetched blobs are deleted."""

GONE: Final = "not found"
TOO_LARGE: Final = "too large"
NO_ROOM: Final = "no room"
OTHER_DIGEST: Final = "another digest"
UNREADABLE: Final = "unreadable"
UNREACHABLE: Final = "peer unreachable"
REFUSED: Final = "peer has another token"
BUSY: Final = "peer is busy"
LATE: Final = "timed out"
BROKEN_OFF: Final = "the transfer broke off"

_DIGEST: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Lost:
    """Unavailable blob, with the reason."""

    why: str


class Transfers(Protocol):
    """Keeper of blobs until dropped; thread-safe, may block."""

    @property
    def address(self) -> str:
        """Return the address for other machines, empty without one."""
        ...

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        """Store the concatenated chunks."""
        ...

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        """Return the verified bytes as writable uint8 [bytes]."""
        ...

    def drop(self, blob: Blob) -> None:
        """Delete a blob anywhere; ignores unknown ones."""
        ...

    def clear(self) -> None:
        """Delete all blobs of the run on this machine."""
        ...

    def close(self) -> None:
        """Stop serving; local blobs remain."""
        ...


def misnamed(blob: Blob) -> Lost | None:
    """Return the problem of a name or size."""
    if not _DIGEST.fullmatch(blob.sha256):
        return Lost(UNREADABLE)
    return None if 0 < blob.bytes <= BLOB_BYTES_MAX else Lost(TOO_LARGE)


def weights_url(address: str, digest: str) -> str:
    """Return the URL of weights, empty without an address.

    Example: ``"grpc://10.0.0.7:40123/weights/<digest>.safetensors"``
    """
    return f"{address}/weights/{digest}.safetensors" if address and digest else ""


class NoTransfers:
    """Transfers that keep nothing."""

    address = ""

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        return Lost(NO_ROOM)

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        return Lost(GONE)

    def drop(self, blob: Blob) -> None:
        pass

    def clear(self) -> None:
        pass

    def close(self) -> None:
        pass
