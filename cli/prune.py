"""`prune`: says which files of a run's policy store nobody needs, and deletes them if asked to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_pipe.audit.prune import PruneCandidate
from dora_pipe.audit.prune_claims import ClaimPlan, plan_claims
from dora_pipe.core.clock import Clock
from dora_pipe.launch.run_dir import OpenRun

HOUR_S = 3600.0


def claims_of(run: OpenRun, archive: Path | None, hours: float, clock: Clock) -> ClaimPlan:
    """Values beside the log that no record names; an archive's own are never touched."""
    if run.directory.is_archive:
        return ClaimPlan()
    return plan_claims(
        run.bus,
        run.topics,
        run.policies,
        clock=clock,
        archive=archive or run.directory.archive,
        age_min_s=hours * HOUR_S,
    )


def rows_of(candidates: Sequence[PruneCandidate]) -> list[dict[str, Any]]:
    """Files as the table shows them."""
    return [
        {
            "file": one.file.name,
            "bytes": one.file.bytes,
            "why": one.why,
            "version": "" if one.version is None else one.version,
        }
        for one in candidates
    ]
