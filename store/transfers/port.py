"""The port through which processes hand bytes to each other; it decides only the words of a loss.

What goes through it is worth nothing but time: whoever does not get a KV cache prefills, whoever
does not get weights reads the policy store. So nothing here is an error. What cannot be kept or got
is `Lost`, with the reason in a few words, the same words every time, so that they can be counted.

A blob is named by its digest, and whoever fetches one compares. `Blob.peer` says where it can be
fetched on another machine; on its own machine a blob is found without.
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
"""A larger one is not handed over: getting it would take as long as making it."""

PLACE_BYTES_MAX: Final = 16 * 1024**3
"""All blobs that lie in one place; beyond that nothing is taken."""

AGE_MAX_NS: Final = 600_000_000_000
"""What nobody has fetched for so long, nobody will; it goes when something new is offered."""

GONE: Final = "it is not here"
TOO_LARGE: Final = "too large"
NO_ROOM: Final = "no room"
OTHER_DIGEST: Final = "another digest"
UNREADABLE: Final = "unreadable"
UNREACHABLE: Final = "its peer cannot be reached"
REFUSED: Final = "its peer has another token"
BUSY: Final = "its peer is busy"
LATE: Final = "not in time"
BROKEN_OFF: Final = "the transfer broke off"

_DIGEST: Final = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Lost:
    """It is not to be had, and why."""

    why: str


class Sink(Protocol):
    """What takes the bytes of a file as they come."""

    def write(self, data: Any, /) -> int:
        """Take a piece; how much of it was taken. Raises OSError."""
        ...


class Transfers(Protocol):
    """Keeps blobs until they are dropped. Calls may block; any thread may call."""

    @property
    def address(self) -> str:
        """Where processes of other machines fetch what is offered here; empty: nowhere."""
        ...

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        """Keep these bytes, one chunk behind the other."""
        ...

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        """The bytes as uint8 [bytes], their digest compared. The caller may write to them."""
        ...

    def drop(self, blob: Blob) -> None:
        """Forget a blob, wherever it lies; unknown ones are ignored."""
        ...

    def clear(self) -> None:
        """Forget all that lie in this place, whoever offered them: the run is over."""
        ...

    def close(self) -> None:
        """Stop serving. What was offered stays for those who share the place."""
        ...


def misnamed(blob: Blob) -> Lost | None:
    """What is wrong with the name or size of a blob, before anything is looked for."""
    if not _DIGEST.fullmatch(blob.sha256):
        return Lost(UNREADABLE)
    return None if 0 < blob.bytes <= BLOB_BYTES_MAX else Lost(TOO_LARGE)


def weights_url(address: str, digest: str) -> str:
    """Where peers get weights from a process of this address; empty where there is none.

    Example: ``"grpc://10.0.0.7:40123/weights/<digest>.safetensors"``
    """
    return f"{address}/weights/{digest}.safetensors" if address and digest else ""


class NoTransfers:
    """For a process that is to hand nothing over."""

    address = ""

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        """Nothing is kept."""
        return Lost(NO_ROOM)

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        """Nothing is there."""
        return Lost(GONE)

    def drop(self, blob: Blob) -> None:
        """Nothing to forget."""

    def clear(self) -> None:
        """Nothing to forget."""

    def close(self) -> None:
        """Nothing to stop."""
