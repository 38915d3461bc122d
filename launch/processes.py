"""Start the processes of a run.

Roles are executed, never forked: libraries with threads or locks (object stores, Arrow, CUDA) do
not survive a fork.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.core.system.console import start_module
from dora_pipe.core.system.linux import die_with
from dora_pipe.launch import roles
from dora_pipe.launch.local_roles import ORCHESTRATOR, TRACES, TRAINER
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.schemas.control import RunStarted

LOG = logging.getLogger(__name__)


class RoleStart(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a role's process: JSON on its standard input."""

    name: str
    directory: str
    config: Config
    first: RunStarted
    adopt: bool = False
    resumed_by: str = ""
    parent_pid: int = msgspec.field(default_factory=os.getpid)


def start_role(start: RoleStart) -> subprocess.Popen[bytes]:
    """Start a role's process. Raises ResourceError."""
    log = RunDir(Path(start.directory)).logs / f"{start.name}.log"
    return start_process(__name__, msgspec.json.encode(start), log)


def start_process(module: str, message: bytes, log: Path) -> subprocess.Popen[bytes]:
    """Start a module as a process, with its output in `log`. Raises ResourceError."""
    log.parent.mkdir(exist_ok=True)
    with log.open("ab") as out:
        return start_module(module, message, stdout=out, stderr=out)


def end_process(work: Callable[[], int]) -> NoReturn:
    """Run `work` and exit with its code, skipping threads and exit handlers of libraries."""
    code = 1
    try:
        code = work()
    finally:
        if sys.exc_info()[0] is not None:
            LOG.error("failed with an internal error", exc_info=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be(start: RoleStart) -> int:
    die_with(start.parent_pid)
    directory, config, name = RunDir(Path(start.directory)), start.config, start.name
    works = {
        ORCHESTRATOR: lambda: roles.orchestrator(
            directory, config, start.first, resumed_by=start.resumed_by
        ),
        TRAINER: lambda: roles.trainer(directory, config, adopt=start.adopt),
        TRACES: lambda: roles.traces(directory, config),
    }
    worker = partial(roles.worker, directory, config, name)
    return roles.run_role(name, directory, works.get(name, worker))


if __name__ == "__main__":
    end_process(lambda: _be(msgspec.json.decode(sys.stdin.buffer.read(), type=RoleStart)))
