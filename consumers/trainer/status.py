"""Phases of the trainer, and the waits it reports."""

from __future__ import annotations

from typing import Literal, NamedTuple

from dora_pipe.core.pure.wait_tracker import LimitKind, PendingWait
from dora_pipe.schemas.metrics import Blocker

Phase = Literal[
    "restoring",
    "idle",
    "part",
    "reading",
    "refusing",
    "training",
    "publishing",
    "committing",
    "ended",
]


class Gauges(NamedTuple):
    """Gauges of the batch reader."""

    records: int
    bytes: int
    waits_for: str = ""
    """Pending read or teacher request, in words."""
    no_room: str = ""

    def blocking(self, phase: Phase) -> str:
        """Return what work of this phase waits for; empty if nothing."""
        beside = phase in ("publishing", "committing")  # the reader is then working for a part
        return self.no_room if beside else self.no_room or self.waits_for


def waits(
    phase: Phase,
    step: int,
    *,
    replayed: int,
    caught_up: bool,
    refused: tuple[int, int],
    reading: str = "",
    parts: int = 0,
) -> list[PendingWait]:
    """Return what the next step waits for; empty while the trainer works.

    `replayed` is the next step to replay, `refused` the last rejected (step, attempt), `reading` a
    pending wait of a port, `parts` the computed parts.
    """
    key, here = str(step), (Blocker("step", str(step)),)
    decided = (Blocker("role", "orchestrator"), *here)
    batch = f"batch of step {step}"
    match phase:
        case "restoring" if step:
            words = f"replay of the committed steps: at step {replayed} of {step}"
            words += f": {reading}" if reading else ""
            return [_found("replay", words, str(replayed), "work", here)]
        case "reading":
            words = f"{batch}: {reading or 'its trajectories are being read'}"
            return [_found("trajectories", words, key, "short", (_topic("trajectories"), *here))]
        case "part" if reading:
            words = f"a part of the {batch}: {reading}"
            return [_found("trajectories", words, key, "short", (_topic("trajectories"), *here))]
        case "training" if reading:
            return [_found("teacher", f"{batch}: {reading}", key, "work", here)]
        case "publishing" if reading:
            return [_found("room", f"policy of step {step}: {reading}", key, "short", here)]
        case "refusing":
            words = f"{batch}: its refusal is not acknowledged yet"
            return [_found("refusal", words, key, "short", (_topic("control"), *here))]
        case "committing":
            words = f"commit of step {step}: not acknowledged yet"
            return [_found("commit", words, key, "short", (_topic("control"), *here))]
        case "idle" if not caught_up:
            words = "decisions: reading those made before this start"
            return [_found("decisions", words, key, "short", (_topic("decisions"),))]
        case "idle" if refused[0] == step:
            words = f"{batch}: attempt {refused[1]} was refused, no new decision yet"
            return [_found("batch", words, f"{key}/{refused[1]}", "work", decided)]
        case "idle":
            words = f"{batch}: no decision yet"
            words += f" but for {parts} part{'s' * (parts > 1)}, computed" if parts else ""
            return [_found("batch", words, key, "work", decided)]
        case _:
            return []


def _found(
    name: str, words: str, key: str, limit: LimitKind, blockers: tuple[Blocker, ...]
) -> PendingWait:
    return PendingWait(name=name, words=words, key=key, limit=limit, still=True, blockers=blockers)


def _topic(name: str) -> Blocker:
    return Blocker("topic", name)
