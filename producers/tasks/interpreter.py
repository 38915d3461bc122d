"""Python interpreter of a task."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.tasks.calls import one_line

ROOT: Final = Path(__file__).resolve().parents[2]

TOKEN_VARIABLE: Final = "DORA_PIPE_TASK_TOKEN"
"""Hidden from users' code."""

OLDEST: Final = (3, 11)

_QUESTION: Final = "import sys; print('%d.%d' % sys.version_info[:2]); import msgspec"
_ANSWER_S: Final = 60.0
_FIXED: Final = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Rewards must not depend on threads or set order."""


class Interpreter:
    """Runs modules of this package for a task."""

    def __init__(self, python: str) -> None:
        """`python`: path; empty: the current interpreter. Raises ConfigError."""
        self._python = python or sys.executable
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if python:
            _check(python)
            # Exposes this package, not those installed next to it.
            self._folder = tempfile.TemporaryDirectory(prefix="dora-pipe-")
            Path(self._folder.name, "dora_pipe").symlink_to(ROOT, target_is_directory=True)

    def command(self, module: str, *words: str) -> Sequence[str]:
        return [self._python, "-P", "-m", module, *words]

    def environment(self) -> Mapping[str, str]:
        found = {**os.environ, **_FIXED}
        found.pop(TOKEN_VARIABLE, None)
        if self._folder is not None:
            paths = [self._folder.name, found.get("PYTHONPATH", "")]
            found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            found.pop("PYTHONHOME", None)
        return found

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _check(python: str) -> None:
    """Raises ConfigError."""
    words = [python, "-c", _QUESTION]
    key = f"task.python: `{python}`"
    try:
        asked = subprocess.run(
            words, capture_output=True, timeout=_ANSWER_S, check=False, text=True
        )
    except FileNotFoundError:
        raise ConfigError(f"{key} does not exist") from None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key} cannot be run: {error}") from error
    version = asked.stdout.strip()
    if not version.replace(".", "").isdecimal():
        raise ConfigError(f"{key} is not Python: {one_line(asked.stderr.strip() or version)}")
    if tuple(map(int, version.split("."))) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ConfigError(f"{key} is Python {version}, expected {needed} or newer")
    if asked.returncode:
        raise ConfigError(
            f"{key} has no msgspec: {one_line(asked.stderr.strip().rpartition(chr(10))[2])}",
            hint=f"{python} -m pip install msgspec",
        )
