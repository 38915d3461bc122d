"""Limits of transfers between processes, and reasons why they fail.

Transfers only save time, so failures return `Lost` with a fixed reason that metrics count. Blobs
are named by digest; `Blob.peer` is the address for other machines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

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
