"""How the process of a bench ends: its pipes are closed, it gets so long, then it is killed."""

from __future__ import annotations

import subprocess
from typing import Any, Final

END_LIMIT_S: Final = 10.0


def end(process: subprocess.Popen[Any], *, at_once: bool) -> None:
    """Close its pipes and wait for it; `at_once` kills it before."""
    if at_once:
        process.kill()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_LIMIT_S)
