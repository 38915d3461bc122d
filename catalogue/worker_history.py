"""An incarnation of a worker, as far as control and decisions tell of it; only values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dora_pipe.schemas.control import WorkerJoined


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """An incarnation of a worker is out."""

    epoch: int
    how: Literal["left", "fenced"]
    why: str
    at_ns: int


@dataclass(slots=True, kw_only=True)
class WorkerHistory:
    """An incarnation of a worker, from when it joined on."""

    joined: WorkerJoined
    epoch: int
    target: int = -1
    """The version it was assigned; -1: none yet."""
    hosted: int = -1
    """The version it reported ready last."""
    assigned: dict[int, int] = field(default_factory=dict)
    """When it was told to load the versions that it has not loaded yet."""
    draining: bool = False
    gone: WorkerGone | None = None

    @property
    def name(self) -> str:
        """What all its incarnations are called."""
        return self.joined.worker
