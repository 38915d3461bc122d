"""Who runs a run on this machine: a lock on its directory, which the kernel takes back in the end.

`run` holds it alone. An orchestrator or trainer that was started by itself holds it with others: a
second one takes over from the first, as it would on another machine; beside a `run`, which starts
its own again, the two would fence each other for ever. A worker may join whoever runs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from dora_pipe.core.errors import UsageError
from dora_pipe.launch.run_dir import LOCK, RunDir

PID_BYTES_MAX: Final = 32


@contextmanager
def locked(directory: RunDir, *, shared: bool = False) -> Iterator[None]:
    """Hold a run for as long as the block lasts; nothing where its directory is not here.

    What is forked meanwhile must not keep the descriptor (`fork_server.release_inherited_files`).
    Raises UsageError where somebody else runs it.
    """
    if not directory.path.is_dir():
        yield
        return
    descriptor = os.open(directory.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _take(descriptor, directory, shared=shared)
        yield
    finally:
        os.close(descriptor)


def refuse_running(directory: RunDir) -> None:
    """Raise UsageError where somebody runs this run on this machine."""
    with locked(directory):
        return


def _take(descriptor: int, directory: RunDir, *, shared: bool) -> None:
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(descriptor, PID_BYTES_MAX).decode("ascii", errors="replace").strip()
        who = f" (process {pid})" if pid else ""
        raise UsageError(
            f"{directory.path.name} is running already{who}",
            hint="stop that one first: Ctrl-C where it was started, or SIGTERM",
        ) from None
    except OSError:
        return  # a file system without locks: as it was before there were any
    os.ftruncate(descriptor, 0)
    if not shared:
        os.write(descriptor, b"%d\n" % os.getpid())
