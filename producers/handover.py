"""The port through which KV caches of moved requests go from worker to worker; decides nothing.

A KV cache is worth nothing but time: whoever does not get one prefills, with the same result. So
nothing here is an error. What cannot be kept or got is `Lost`, with the reason in a few words, the
same words every time, so that they can be counted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from dora_pipe.producers.engines.port import Kv
from dora_pipe.schemas.policy import Blob
from dora_pipe.transfers.port import GONE, NO_ROOM, Lost

OTHER_REQUEST: Final = "another request"
"""Of those reasons that only a cache can have; the others are those of every transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLabel:
    """Whose KV cache it is: written beside it, and asked for when it is fetched."""

    trajectory: str
    prefix: str
    """sha256 (hex) of the token ids that the cache covers, 8 bytes each, little endian."""


class Handover(Protocol):
    """Keeps KV caches until they are fetched. Calls may block; they come from one thread.

    `KvHandover` is the one for production, through any way of transfer.
    """

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Keep a cache under the digest of its bytes."""
        ...

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """The cache with this digest and label."""
        ...

    def drop(self, blob: Blob) -> None:
        """Forget a cache; unknown ones are ignored."""
        ...

    def clear(self) -> None:
        """Forget all of them, whoever put them: the run is over."""
        ...


def label_of(trajectory: str, token_ids: Sequence[int]) -> KvLabel:
    """The label of the cache of a sequence: of all its tokens but the last."""
    covered = np.asarray(token_ids[:-1], "<i8").tobytes()
    return KvLabel(trajectory=trajectory, prefix=hashlib.sha256(covered).hexdigest())


class NoHandover:
    """For a worker that has no place to hand anything over: its requests are prefilled."""

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Nothing is kept."""
        return Lost(NO_ROOM)

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """Nothing is there."""
        return Lost(GONE)

    def drop(self, blob: Blob) -> None:
        """Nothing to forget."""

    def clear(self) -> None:
        """Nothing to forget."""


@dataclass(slots=True)
class MemoryHandover:
    """For workers of one process: tests and the simulator.

    Example: ``MemoryHandover()``, shared by all workers that are said to run on one machine.
    """

    kept: dict[str, tuple[KvLabel, Kv]] = field(default_factory=dict)
    """By digest; a test may take away what it likes."""

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Keep the object itself."""
        digest = hashlib.sha256(f"{label}{kv.layout}{kv.weights}{kv.tokens}".encode())
        for name in sorted(kv.arrays):
            digest.update(name.encode())
            digest.update(kv.arrays[name].tobytes())
        self.kept[digest.hexdigest()] = (label, kv)
        return Blob(sha256=digest.hexdigest(), bytes=kv.bytes)

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """The object that was kept."""
        if blob.sha256 not in self.kept:
            return Lost(GONE)
        found, kv = self.kept[blob.sha256]
        return kv if found == label else Lost(OTHER_REQUEST)

    def drop(self, blob: Blob) -> None:
        """Forget it."""
        self.kept.pop(blob.sha256, None)

    def clear(self) -> None:
        """Forget all."""
        self.kept.clear()
