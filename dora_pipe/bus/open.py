"""Decides which bus an address means."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.bus.port import Bus
from dora_pipe.errors import UsageError


def open_bus(url: str) -> Bus:
    """The bus at ``sqlite:PATH`` or ``kafka://host:port[,host:port]``; nothing is created.

    Raises UsageError for any other address, BusError when the log cannot be reached.
    """
    kind, _, rest = url.partition(":")
    if kind == "sqlite" and rest:
        from dora_pipe.bus.sqlite import SqliteBus

        return SqliteBus(Path(rest))
    if kind == "kafka" and rest.strip("/"):
        from dora_pipe.bus.kafka import KafkaBus

        return KafkaBus(rest.strip("/").split(","))
    if kind == "memory":
        raise UsageError(
            "a log in memory cannot be opened by its address",
            hint="it lives inside one process; use sqlite:PATH between processes",
        )
    raise UsageError(f"`{url}` is not a log", hint="sqlite:PATH or kafka://HOST:PORT[,HOST:PORT]")
