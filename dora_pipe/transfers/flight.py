"""Blobs and weights between machines over Arrow Flight; decides where a blob is looked for.

What this process offers lies in this machine's own place (`MappedFiles`) and is served from there.
A blob is looked for in that place first, so that two processes of one machine never use the
network, then at the peer that its record names. What comes from a peer is hashed chunk by chunk
while it comes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from dora_pipe.schemas.policy import Blob
from dora_pipe.transfers.files import MappedFiles
from dora_pipe.transfers.flight_client import Client
from dora_pipe.transfers.flight_server import STREAMS_MAX, Server
from dora_pipe.transfers.port import (
    BROKEN_OFF,
    GONE,
    LATE,
    NO_ROOM,
    OTHER_DIGEST,
    Array,
    Lost,
    misnamed,
)

WAIT_S: Final = 5.0
BYTES_PER_S_MIN: Final = 20_000_000
"""Weights that come more slowly than this, after `WAIT_S`, are read from the store instead."""

LINGER_S: Final = 5.0
"""A process that ends serves what it offered for so long; behind that, requests are prefilled."""

REMEMBERED_MAX: Final = 10_000
"""Blobs that a process remembers for that."""

LINGER_TURN_S: Final = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this process is to its peers.

    Example: ``Identity(token=token, run="demo", host="10.0.0.7", port=0)``
    """

    token: bytes
    run: str
    host: str
    """Where it listens, and what peers connect to."""
    port: int = 0
    """0: any that is free."""
    listen: str = ""
    """What it listens on, if that is not `host`."""
    server_tls: tuple[tuple[str, Any], ...] = ()
    client_tls: tuple[tuple[str, Any], ...] = ()
    """Further arguments for pyarrow's server and clients."""

    @property
    def scheme(self) -> str:
        """How peers connect."""
        return "grpc+tls" if self.server_tls else "grpc"


class FlightTransfers:
    """See the module. `weights` says where weights of a file name lie on this machine.

    Example: ``FlightTransfers(MappedFiles(...), identity, weights=lambda name: root / name)``
    """

    def __init__(
        self,
        place: MappedFiles,
        identity: Identity,
        *,
        weights: Callable[[str], Path],
        streams_max: int = STREAMS_MAX,
        linger_s: float = LINGER_S,
    ) -> None:
        self._place = place
        self._linger_s = linger_s
        self._offered: set[str] = set()
        self._sent: set[str] = set()
        self._client = Client(identity.token, identity.run, **dict(identity.client_tls))
        self._server = Server(
            f"{identity.scheme}://{identity.listen or identity.host}:{identity.port}",
            token=identity.token,
            run=identity.run,
            shelves={"kv": lambda leaf: place.path(Blob(sha256=leaf, bytes=0)), "weights": weights},
            drop=lambda leaf: place.drop(Blob(sha256=leaf, bytes=1)),
            sent=self._sent.add,
            streams_max=streams_max,
            **dict(identity.server_tls),
        )
        self.address = f"{identity.scheme}://{identity.host}:{self._server.port}"

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        """See `Transfers`; the blob says where this process serves it."""
        blob = self._place.offer(chunks)
        if isinstance(blob, Lost):
            return blob
        if len(self._offered) >= REMEMBERED_MAX:
            self._offered.clear()
            self._sent.clear()
        self._offered.add(blob.sha256)
        return msgspec.structs.replace(blob, peer=self.address)

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        """See `Transfers`: from this machine's place, else from the peer."""
        found = self._place.fetch(blob, timeout_s=timeout_s)
        if isinstance(found, Lost) and found.why == GONE and self._is_elsewhere(blob):
            return self._from_peer(blob, timeout_s)
        return found

    def drop(self, blob: Blob) -> None:
        """See `Transfers`. A peer that does not hear it deletes the file when it is old."""
        if misnamed(blob) is not None:
            return
        here = self._place.path(blob).exists()
        self._place.drop(blob)
        if not here and self._is_elsewhere(blob):
            self._client.drop(blob.peer, f"kv/{blob.sha256}")

    def clear(self) -> None:
        """See `Transfers`."""
        self._place.clear()

    def close(self) -> None:
        """Stop serving, as soon as nobody waits for what was offered here, or after `LINGER_S`.

        A worker that was drained has just let go of requests, whose caches lie here alone. Streams
        that run are finished: their clients have deadlines.
        """
        until_s = time.monotonic() + self._linger_s
        while self._awaited() and time.monotonic() < until_s:
            time.sleep(LINGER_TURN_S)
        for sha256 in self._sent:
            self._place.drop(Blob(sha256=sha256, bytes=1))
        self._client.close()
        self._server.shutdown()
        self._server.wait()

    def copy(self, peer: str, name: str, target: BinaryIO) -> Lost | None:
        """Write the bytes of a peer's `weights/<digest>.safetensors`; they are not compared here.

        None when all of it was written.
        """
        size = self._client.size(peer, name)
        if isinstance(size, Lost):
            return size
        written, full = 0, False

        def take(chunk: Array) -> bool:
            nonlocal written, full
            try:
                written += target.write(chunk.data)
            except OSError:
                full = True
            return written <= size and not full

        timeout_s = WAIT_S + size / BYTES_PER_S_MIN
        lost = self._client.receive(peer, name, take, timeout_s=timeout_s)
        if full:
            return Lost(NO_ROOM)
        return lost or (None if written == size else Lost(BROKEN_OFF))

    def _awaited(self) -> bool:
        """Whether something that was offered here has been neither sent nor dropped."""
        lying = (self._place.path(Blob(sha256=one, bytes=1)) for one in self._offered - self._sent)
        return any(path.exists() for path in lying)

    def _is_elsewhere(self, blob: Blob) -> bool:
        return blob.peer not in ("", self.address)

    def _from_peer(self, blob: Blob, timeout_s: float) -> Array | Lost:
        if timeout_s <= 0:
            return Lost(LATE)
        data = np.empty(blob.bytes, np.uint8)
        digest, at = hashlib.sha256(), 0

        def take(chunk: Array) -> bool:
            nonlocal at
            if at + len(chunk) > blob.bytes:
                return False
            digest.update(chunk.data)
            data[at : at + len(chunk)] = chunk
            at += len(chunk)
            return True

        name = f"kv/{blob.sha256}"
        lost = self._client.receive(blob.peer, name, take, timeout_s=timeout_s)
        if lost is not None:
            return lost
        if at != blob.bytes or digest.hexdigest() != blob.sha256:
            return Lost(OTHER_DIGEST)
        return data
