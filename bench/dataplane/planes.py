"""Decides which way from process to process an address of the bench means."""

from __future__ import annotations

from typing import Final

from dora_pipe.bench.dataplane.pipe import PipeBus
from dora_pipe.bus import open_bus
from dora_pipe.bus.port import Bus

PIPE: Final = "pipe"


def open_plane(address: str, *, reads: bool) -> Bus:
    """A log by its address, or one end of a pipe: ``pipe:FD``. Raises what `open_bus` raises."""
    kind, _, rest = address.partition(":")
    return PipeBus(int(rest), reads=reads) if kind == PIPE else open_bus(address)
