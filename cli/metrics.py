"""`metrics`: the numbers of a run for Prometheus, from its log, live or finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.core.errors import DoraError
from dora_pipe.launch.run_dir import OpenRun


def contributions_of(run: OpenRun) -> Callable[[str], list[dict[str, Any]]]:
    """Reads contributions files of a run; no rows where there is none that can be read."""

    def rows(sha256: str) -> list[dict[str, Any]]:
        try:
            if not run.has_policies or not run.policies.has_blob("contributions", sha256):
                return []
            return read_contributions(run.policies.blob("contributions", sha256))
        except (DoraError, OSError, ValueError):
            return []

    return rows
