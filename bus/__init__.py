"""The log: one interface with memory, SQLite and Kafka implementations."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.bus.blobs import BlobBus, BlobStore
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.kafka.security import KafkaSecurity
from dora_pipe.core.errors import UsageError

__all__ = ["open_bus"]


def open_bus(
    url: str,
    security: KafkaSecurity | None = None,
    *,
    blobs: BlobStore | None = None,
    blob_above_bytes: int | None = None,
) -> Bus:
    """Open ``sqlite:PATH`` or ``kafka://host:port[,host:port]`` without creating anything.

    `blobs` stores values too large for the log (else rejected) or above `blob_above_bytes`.
    Raises UsageError for any other address, ConfigError for a missing secret, BusError if
    unreachable.
    """
    bus = _open(url, security)
    return bus if blobs is None else BlobBus(bus, blobs, above_bytes=blob_above_bytes)


def _open(url: str, security: KafkaSecurity | None) -> Bus:
    kind, _, rest = url.partition(":")
    if kind == "sqlite" and rest:
        from dora_pipe.bus.sqlite import SqliteBus

        return SqliteBus(Path(rest))
    if kind == "kafka" and rest.strip("/"):
        from dora_pipe.bus.kafka.bus import KafkaBus

        if "@" in rest:  # the URL is logged: do not print its password
            raise UsageError("a log address must not contain credentials", hint="see bus.username")
        servers = rest.strip("/").split(",")
        return KafkaBus(servers) if security is None else KafkaBus(servers, security=security)
    if kind == "memory":
        raise UsageError(
            "a log in memory has no address",
            hint="use sqlite:PATH between processes",
        )
    raise UsageError(f"`{url}` is not a log", hint="sqlite:PATH or kafka://HOST:PORT[,HOST:PORT]")
