"""Pairs of processes that transfer blobs, by every transport, with faults."""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.flight import FlightTransfers, Identity
from dora_pipe.store.transfers.transfers import (
    AGE_MAX_NS,
    BLOB_BYTES_MAX,
    GONE,
    LATE,
    NO_ROOM,
    OTHER_DIGEST,
    PLACE_BYTES_MAX,
    TOO_LARGE,
    Array,
    Lost,
    Transfers,
    misnamed,
)
from tests.support.kafka_broker import free_ports
from tests.support.worker import VirtualClock

TOKEN = b"a token that is long enough"
RUN = "tiny"
HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ends: `target` fetches what `source` offers. `age` makes stored blobs old."""

    source: Transfers
    target: Transfers
    clock: VirtualClock
    damage: Callable[[Blob], None]
    kept: Callable[[], int]
    """Number of blobs stored by `source`."""


class MakePair(Protocol):
    def __call__(self, folder: Path, *, bytes_max: int = 1 << 30) -> Iterator[Pair]: ...


@dataclass(slots=True)
class MemoryTransfers:
    """Transfers shared by roles of one machine. Example: ``MemoryTransfers(SystemClock())``"""

    clock: Clock
    bytes_max: int = PLACE_BYTES_MAX
    kept: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """(time offered in ns, bytes) by digest; tests may change it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def address(self) -> str:
        return ""

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost:
        data = b"".join(chunks)
        if len(data) > BLOB_BYTES_MAX:
            return Lost(TOO_LARGE)
        now_ns = self.clock.wall_ns()
        blob = Blob(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        with self.lock:
            for name, (at_ns, _) in list(self.kept.items()):
                if at_ns < now_ns - AGE_MAX_NS:
                    del self.kept[name]
            if sum(len(entry) for _, entry in self.kept.values()) + len(data) > self.bytes_max:
                return Lost(NO_ROOM)
            self.kept[blob.sha256] = (now_ns, data)
        return blob

    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost:
        if (wrong := misnamed(blob)) is not None:
            return wrong
        if timeout_s <= 0:
            return Lost(LATE)
        with self.lock:
            if blob.sha256 not in self.kept:
                return Lost(GONE)
            data = self.kept[blob.sha256][1]
        if len(data) != blob.bytes or hashlib.sha256(data).hexdigest() != blob.sha256:
            self.drop(blob)
            return Lost(OTHER_DIGEST)
        return np.frombuffer(data, np.uint8).copy()

    def drop(self, blob: Blob) -> None:
        with self.lock:
            self.kept.pop(blob.sha256, None)

    def clear(self) -> None:
        with self.lock:
            self.kept.clear()

    def close(self) -> None:
        """Do nothing."""


def memory_pair(folder: Path, *, bytes_max: int = 1 << 30) -> Iterator[Pair]:
    clock = VirtualClock()
    transfers = MemoryTransfers(clock, bytes_max=bytes_max)

    def damage(blob: Blob) -> None:
        at_ns, data = transfers.kept[blob.sha256]
        transfers.kept[blob.sha256] = (at_ns, flipped(data))

    yield Pair(
        source=transfers,
        target=transfers,
        clock=clock,
        damage=damage,
        kept=lambda: len(transfers.kept),
    )


def files_pair(folder: Path, *, bytes_max: int = 1 << 30) -> Iterator[Pair]:
    clock = VirtualClock()
    source, target = (
        MappedFiles(folder / "place", clock=clock, bytes_max=bytes_max) for _ in range(2)
    )
    yield Pair(
        source=source,
        target=target,
        clock=clock,
        damage=lambda blob: flip(source.path(blob)),
        kept=lambda: files_in(folder / "place"),
    )


def flight_pair(folder: Path, *, bytes_max: int = 1 << 30) -> Iterator[Pair]:
    clock = VirtualClock()
    with (
        served(folder / "source", clock=clock, bytes_max=bytes_max) as source,
        served(folder / "target", clock=clock) as target,
    ):
        files = MappedFiles(folder / "source" / "place", clock=clock)
        yield Pair(
            source=source,
            target=target,
            clock=clock,
            damage=lambda blob: flip(files.path(blob)),
            kept=lambda: files_in(folder / "source" / "place"),
        )


PAIRS: dict[str, MakePair] = {"memory": memory_pair, "files": files_pair, "flight": flight_pair}


@contextmanager
def served(
    folder: Path,
    *,
    clock: VirtualClock | None = None,
    bytes_max: int = 1 << 30,
    token: bytes = TOKEN,
    run: str = RUN,
    streams_max: int = 8,
    port: int = 0,
    linger_s: float = 0.0,
) -> Iterator[FlightTransfers]:
    files = MappedFiles(folder / "place", clock=clock or VirtualClock(), bytes_max=bytes_max)
    transfers = FlightTransfers(
        files,
        Identity(token=token, run=run, host=HOST, port=port),
        stored=lambda name: folder / "policies" / name,
        streams_max=streams_max,
        linger_s=linger_s,
    )
    try:
        yield transfers
    finally:
        transfers.close()


@contextmanager
def mute_peer() -> Iterator[str]:
    """Yield an address that accepts connections and never answers."""
    with socket.create_server((HOST, 0)) as server:
        taken: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    taken.append(server.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"grpc://{HOST}:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for decision in taken:
                decision.close()


def nobody() -> str:
    return f"grpc://{HOST}:{free_ports(1)[0]}"


def files_in(folder: Path) -> int:
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def flip(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes()))


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])
