"""What the trainer says of itself: its phases, and in words what it waits for."""

from __future__ import annotations

from typing import Literal, NamedTuple

Phase = Literal[
    "restoring", "idle", "reading", "refusing", "training", "publishing", "committing", "ended"
]


class Gauges(NamedTuple):
    """What a port tells of the batch reader at any time."""

    records: int
    """In its cache."""
    bytes: int
    waits_for: str = ""
    """What it has not reached yet, in words."""


def waits_for(
    phase: Phase,
    step: int,
    *,
    replayed: int,
    caught_up: bool,
    refused: int | None,
    reading: str = "",
) -> str:
    """What stands between the trainer and the next step; empty while it works.

    `step` is the next one, `replayed` the committed step that a restart comes to next, `refused`
    the attempt of the next step that was refused last, `reading` what the reader waits for.

    Example: ``waits_for("idle", 7, ...) == "batch of step 7: no decision yet"``
    """
    if phase == "restoring":
        return f"replay of the committed steps: at step {replayed} of {step}" if step else ""
    if phase == "reading":
        return f"batch of step {step}: {reading or 'its trajectories are being read'}"
    if phase == "refusing":
        return f"batch of step {step}: its refusal is not acknowledged yet"
    if phase == "committing":
        return f"commit of step {step}: not acknowledged yet"
    if phase != "idle":
        return ""
    if not caught_up:
        return "decisions: those made before this start are being read"
    if refused is not None:
        return f"batch of step {step}: attempt {refused} was refused, no other yet"
    return f"batch of step {step}: no decision yet"
