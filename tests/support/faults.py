"""Runs `dora-pipe bench faults` as users do, in a process of its own, and reads what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALL = "from dora_pipe.cli.main import main; main()"


@dataclass(frozen=True)
class Rounds:
    """What the command said."""

    code: int
    rows: list[dict[str, Any]]
    talk: str


def kill_rounds(folder: Path, *arguments: str, limit_s: float) -> Rounds:
    """Play rounds in `folder`, on one thread per process. Raises when the limit is not enough."""
    done = subprocess.run(
        [sys.executable, "-c", CALL, "bench", "faults", "--json", *arguments],
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return Rounds(done.returncode, rows, done.stderr)
