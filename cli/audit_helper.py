"""What helps `audit` read: opens the log of a run, or an address, in a process of its own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import IO

import msgspec

from dora_pipe.audit.helpers import Request, Start, serve
from dora_pipe.bus.open import open_bus
from dora_pipe.launch.fork_server import ForkedHelpers
from dora_pipe.launch.run_dir import opened


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """Which log: that of a run as it is named on a command line, or of `url`."""

    run: str = ""
    archive: str = ""
    url: str = ""


class Aid(msgspec.Struct, frozen=True, kw_only=True):
    """What a helper is forked with."""

    log: Log
    request: Request


_AID = msgspec.json.Decoder(Aid)


def help_audit(words: bytes, out: IO[bytes]) -> None:
    """Be a helper, with the words of an `Aid`. Raises whatever opening the log does."""
    aid = _AID.decode(words)
    log = aid.log
    if log.url:
        with closing(open_bus(log.url)) as bus:
            serve(bus, aid.request, out)
        return
    with opened(log.run, archive=Path(log.archive) if log.archive else None) as run:
        serve(run.bus, aid.request, out)


def starting(forks: ForkedHelpers, log: Log) -> Start:
    """How to begin helpers on this log."""
    return lambda request: forks.start(msgspec.json.encode(Aid(log=log, request=request)))
