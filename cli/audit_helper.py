"""The process that helps `audit` read: opens the log of a run, or an address, and serves it."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import msgspec

from dora_pipe.bus.open import open_bus
from dora_pipe.history.helpers import Request, serve

OUT_BYTES = 1 << 20


def main(kind: str, where: str, archive: str = "") -> None:
    """Serve the log of ``run DIRECTORY [ARCHIVE]`` or ``url ADDRESS``."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    gc.freeze()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=OUT_BYTES) as out:
        if kind == "url":
            bus = open_bus(where)
            try:
                serve(bus, request, out)
            finally:
                bus.close()
            return
        from dora_pipe.cli.rundir import opened  # What a run's directory takes; an address less.

        with opened(where, archive=Path(archive) if archive else None) as run:
            serve(run.bus, request, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
