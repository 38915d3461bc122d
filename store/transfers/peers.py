"""Peers that have weights, from their last statuses in the metrics topic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Final

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import BusError, SchemaError
from dora_pipe.core.pure.records import Record
from dora_pipe.schemas.metrics import TrainerStatus, WorkerStatus, decode_metrics
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.store.transfers.transfers import Lost

TAIL_RECORDS: Final = 4000
"""Records per partition, of hundreds of roles."""

LOG = logging.getLogger(__name__)

PEERS_MAX: Final = 4
"""Maximum peers asked."""


class PeerFinder:
    """Finder of peers; excludes its own address."""

    def __init__(self, open_bus: Callable[[], Bus], topics: Topics, *, own: str) -> None:
        self._open_bus = open_bus
        self._topic = topics.metrics
        self._own = own

    def having(self, name: str) -> list[str]:
        """Return addresses of peers with these weights, in an order specific to the caller."""
        addresses: dict[str, str] = {}
        try:
            for record in self._tail():
                _note(addresses, record)
        except BusError:
            return []
        peers = {peer for peer, url in addresses.items() if url == f"{peer}/{name}"} - {self._own}
        return sorted(peers, key=lambda peer: sha256_hex(self._own.encode(), peer.encode()))

    def _tail(self) -> Iterator[Record]:
        with closing(self._open_bus()) as bus:
            for tp, end in ends_of(bus, self._topic).items():
                start = max(bus.begin(tp), end - TAIL_RECORDS)
                yield from records_of(bus, {tp: end}, start=start)


def _note(addresses: dict[str, str], record: Record) -> None:
    status = _serving(record)
    if status is not None:
        address, _, _ = status.weights_at.partition("/weights/")
        addresses[address] = status.weights_at


def _serving(record: Record) -> WorkerStatus | TrainerStatus | None:
    if b'"weights_at":"grpc' not in record.value:  # skip decoding of most records
        return None
    try:
        status = decode_metrics(record.value)
    except SchemaError:
        return None
    return status if isinstance(status, WorkerStatus | TrainerStatus) else None


Copy = Callable[[str, str, BinaryIO], Lost | None]
"""Write a file of a peer, by address and name; see `FlightTransfers.copy`."""


class PeerWeights:
    """Peers of a `PolicyStore`; `having` returns those that may have a name."""

    def __init__(self, copy: Copy, having: Callable[[str], list[str]]) -> None:
        self._copy = copy
        self._having = having

    def __call__(self, name: str, target: Path) -> bool:
        """Write the file; return False if no peer has it.

        Peers with weights may have their delta.
        """
        folder, _, leaf = name.partition("/")
        if folder not in ("deltas", "weights"):
            return False
        weights = f"weights/{leaf.partition('.')[0]}.safetensors"
        for peer in self._having(weights)[:PEERS_MAX]:
            with target.open("wb") as file:
                lost = self._copy(peer, name, file)
            if lost is None:
                LOG.info("%s came from %s", name[:20], peer)
                return True
            LOG.info("%s did not come from %s: %s", name[:20], peer, lost.why)
        return False
