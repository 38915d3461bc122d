"""Gathers evidence for an audit in a process of its own.

python -m dora_pipe.audit.helper      started by `audit`, of no use by hand
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import msgspec

from dora_pipe.audit.evidence import Request, serve
from dora_pipe.core.console import die_with, name_process, start_module
from dora_pipe.store.log_location import LogLocation


class HelperStart(msgspec.Struct, frozen=True, kw_only=True):
    """The message to a helper: JSON on its standard input."""

    log: LogLocation
    request: Request
    parent_pid: int


def start_helper(log: LogLocation, request: Request) -> subprocess.Popen[bytes]:
    """Start a helper, which writes frames to its standard output. Raises ResourceError."""
    message = msgspec.json.encode(HelperStart(log=log, request=request, parent_pid=os.getpid()))
    return start_module("dora_pipe.audit.helper", message, stdout=subprocess.PIPE)


def main() -> None:
    """Read to the ends and write what was read. Raises whatever opening the log does."""
    start = msgspec.json.decode(sys.stdin.buffer.read(), type=HelperStart)
    die_with(start.parent_pid)
    name_process("helper")
    with closing(start.log.open()) as bus:
        serve(bus, start.request, sys.stdout.buffer)


if __name__ == "__main__":
    main()
