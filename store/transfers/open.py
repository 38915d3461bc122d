"""Factory of transfers from the configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.kafka.security import read_secret
from dora_pipe.config.outside import Transfers as Section
from dora_pipe.core.errors import ConfigError
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.peers import PeerFinder, PeerWeights

if TYPE_CHECKING:
    from dora_pipe.store.transfers.flight import Identity

TOKEN_VARIABLE: Final = "DORA_PIPE_TRANSFERS_TOKEN"
TOKEN_CHARACTERS_MIN: Final = 16
LOOPBACK: Final = "127.0.0.1"
"""Default of `host`: unreachable from outside."""


def open_transfers(
    section: Section,
    folder: Path,
    *,
    topics: Topics,
    open_bus: Callable[[], Bus],
    stored: Callable[[str], Path],
    clock: Clock,
) -> MappedFiles:
    """Open the configured transfers; `folder` is the local directory. Raises ConfigError."""
    if section.kind == "none":
        return MappedFiles(folder, clock=clock, bytes_max=0)
    if section.kind == "files":
        return MappedFiles(folder, clock=clock)
    from dora_pipe.store.transfers.flight import FlightTransfers

    identity = _identity(section, topics.run)
    try:
        flight = FlightTransfers(folder, identity, stored=stored, clock=clock)
    except (OSError, pa.ArrowException) as error:
        where = f"{identity.host}:{identity.port}"
        raise ConfigError(
            f"cannot listen on {where} for transfers: {str(error).splitlines()[0]}",
            hint="set transfers.host to an own address and transfers.port to a free port",
        ) from None
    finder = PeerFinder(open_bus, topics, own=flight.address)
    flight.peers = PeerWeights(flight.copy, finder.having)
    return flight


def need_transfers(section: Section) -> None:
    """Raises ConfigError before start if transfers cannot be opened."""
    if section.kind == "flight":
        _identity(section, "")


def _identity(section: Section, run: str) -> Identity:
    from dora_pipe.store.transfers.flight import Identity

    server: dict[str, Any] = {}
    client: dict[str, Any] = {}
    if section.cert_file:
        identity = read_secret("transfers.cert_file", section.cert_file)
        server["tls_certificates"] = [(identity, identity)]
    if section.ca_file:
        client["tls_root_certs"] = read_secret("transfers.ca_file", section.ca_file)
    return Identity(
        token=_token(),
        run=run,
        host=section.host or LOOPBACK,
        port=section.port,
        server_tls=server,
        client_tls=client,
    )


def _token() -> bytes:
    token = os.environ.get(TOKEN_VARIABLE, "").encode()
    if not token:
        raise ConfigError(
            'transfers.kind = "flight" needs a token that all processes of the run know',
            hint=f"set {TOKEN_VARIABLE}",
        )
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"the token for transfers has fewer than {TOKEN_CHARACTERS_MIN} characters",
            hint="make one: openssl rand -hex 32",
        )
    return token
