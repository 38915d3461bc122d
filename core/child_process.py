"""Starts processes of this package, each with a message on its standard input."""

from __future__ import annotations

import os
import subprocess
import sys
from tempfile import TemporaryFile
from typing import IO

from dora_pipe.core.errors import ResourceError


def start_module(
    module: str, message: bytes, *, stdout: IO[bytes] | int, stderr: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` in a session of its own. Raises ResourceError.

    The message is in memory: a process that does not read it blocks no caller.
    """
    try:
        with _open_message() as stdin:
            stdin.write(message)
            stdin.seek(0)
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,
            )
    except OSError as error:
        raise ResourceError(f"cannot start a process: {error.strerror}") from None


def _open_message() -> IO[bytes]:
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("start"), "w+b")  # a full disk starts roles, too
    return TemporaryFile()
