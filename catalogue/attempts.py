"""What became of one sibling, of its attempts, and of an incarnation of a worker; only values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dora_pipe.schemas.control import TrajectoryLogged, WorkerJoined

Outcome = Literal["", "logged", "moved", "left", "fenced", "failed", "cancelled"]
"""How an attempt ended: with its record, because its request moved, with its worker, in an error,
or because it was not needed any more; empty while it goes on."""


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One attempt at a request: from its placement on a worker until that lets go of it."""

    attempt: int
    worker: str
    epoch: int
    host: WorkerHistory | None
    """The incarnation that has it; None where it never joined."""
    round: int
    placed_ns: int
    reason: str
    resumed: int
    """Sampled tokens it went on from."""
    outcome: Outcome = ""
    ended_ns: int = 0
    why: str = ""
    retryable: bool = True
    """Whether another attempt may follow one that failed."""
    move_ns: int = 0
    """When the worker was asked to let go of it."""
    move_to: str = ""
    move_why: str = ""


@dataclass(slots=True, kw_only=True)
class RequestHistory:
    """One sibling: its attempts, and the record that counts."""

    trajectory: str
    attempts: list[Attempt] = field(default_factory=list)
    logged: TrajectoryLogged | None = None
    offset: int = -1
    """Of the report in control that says so."""

    @property
    def moved(self) -> bool:
        """Whether it went from worker to worker."""
        return len(self.attempts) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """An incarnation of a worker is out."""

    worker: WorkerHistory = field(compare=False, repr=False)
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
