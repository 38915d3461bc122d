"""Runner of `python -m bench faults` in a separate process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.user_run import bench


@dataclass(frozen=True)
class Rounds:
    code: int
    rows: list[dict[str, Any]]
    talk: str


def kill_rounds(folder: Path, *arguments: str, limit_s: float) -> Rounds:
    done = bench(folder, "faults", "--json", *arguments, wait_s=limit_s)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return Rounds(done.returncode, rows, done.stderr)
