"""Pairs of processes that transfer blobs, by every transport, with faults."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.flight import FlightTransfers, Identity
from tests.support.kafka_broker import free_ports
from tests.support.worker import VirtualClock

TOKEN = b"a token that is long enough"
RUN = "tiny"
HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two ends: `target` fetches what `source` offers. `age` makes stored blobs old."""

    source: MappedFiles
    target: MappedFiles
    clock: VirtualClock
    damage: Callable[[Blob], None]
    kept: Callable[[], int]
    """Number of blobs stored by `source`."""


class MakePair(Protocol):
    def __call__(self, folder: Path, *, bytes_max: int = 1 << 30) -> Iterator[Pair]: ...


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


PAIRS: dict[str, MakePair] = {"files": files_pair, "flight": flight_pair}


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
    transfers = FlightTransfers(
        folder / "place",
        Identity(token=token, run=run, host=HOST, port=port),
        stored=lambda name: folder / "policies" / name,
        clock=clock or VirtualClock(),
        bytes_max=bytes_max,
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
