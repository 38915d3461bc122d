"""Values of what records have gained; their bytes are golden like those of `values`."""

from __future__ import annotations

from dora_pipe.schemas import control, metrics, rounds
from tests.golden.values import AT_NS, COST, DIGEST, GROUP, SHA256

ROUND_HALT = rounds.Round(
    ordinal=3,
    role_epoch=0,
    now_ns=3,
    control_next=2,
    decisions=(
        rounds.Halt(
            reason="all of the last 8 groups that ended have failed",
            error="KeyError: 'answr'",
            trajectory=f"{GROUP}-001",
        ),
    ),
)
"""Too many groups fail."""

LOGGED_INVALID = control.TrajectoriesLogged(
    at_ns=AT_NS,
    worker="w0",
    epoch=7,
    version=3,
    digest=DIGEST,
    trajectories=(
        control.LoggedEntry(
            trajectory=f"{GROUP}-001",
            attempt=1,
            partition=2,
            offset=91,
            sha256=SHA256,
            bytes=1502,
            tokens=24,
            reward=None,
            finish="stop",
            error="KeyError: 'answr'",
        ),
    ),
)
"""A trajectory whose reward raised."""

STATUS_SINCE = metrics.WorkerStatus(
    at_ns=AT_NS,
    cost=COST,
    worker="w0",
    epoch=7,
    version=3,
    active=1,
    waiting=0,
    kv_used_tokens=2048,
    tokens_total=99_999,
    progress={f"{GROUP}-002": control.Resume(tokens=256, partition=2, offset=18)},
    since=True,
    ended=(f"{GROUP}-001",),
)
"""A status that says of the progress what has changed."""
