"""Weights from peers before the policy store is read; decides how many peers are asked.

The store compares what comes with its name, and reads its own file when that is something else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from dora_pipe.transfers.port import Lost

LOG = logging.getLogger(__name__)

PEERS_MAX: Final = 4
"""So many are asked; when none of them has time the store is read at once."""


class Source(Protocol):
    """What gets a file from a peer; see `FlightTransfers.copy`."""

    def copy(self, peer: str, name: str, target: BinaryIO) -> Lost | None:
        """Write a peer's file; None when all of it was written."""
        ...


class PeerWeights:
    """What a `PolicyStore` asks first. `having` says which peers may have a name.

    Example: ``PolicyStore(root, remote, peers=PeerWeights(transfers, book.having))``
    """

    def __init__(self, source: Source, having: Callable[[str], list[str]]) -> None:
        self._source = source
        self._having = having

    def __call__(self, name: str, target: Path) -> bool:
        """Write the file of this name; False when no peer gave it."""
        if not name.startswith("weights/"):
            return False
        for peer in self._having(name)[:PEERS_MAX]:
            with target.open("wb") as file:
                lost = self._source.copy(peer, name, file)
            if lost is None:
                LOG.info("%s came from %s", name[:20], peer)
                return True
            LOG.info("%s did not come from %s: %s", name[:20], peer, lost.why)
        return False
