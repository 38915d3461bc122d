"""Runs `python -m bench faults` in a process of its own and reads its output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.user_run import bench


@dataclass(frozen=True)
class Rounds:
    """What the command said."""

    code: int
    rows: list[dict[str, Any]]
    talk: str


def kill_rounds(folder: Path, *arguments: str, limit_s: float) -> Rounds:
    """Play rounds in `folder`, on one thread per process. Raises when the limit is not enough."""
    done = bench(folder, "faults", "--json", *arguments, wait_s=limit_s)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return Rounds(done.returncode, rows, done.stderr)
