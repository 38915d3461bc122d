"""What the pages know of a run: groups, trajectories, steps, workers; only values.

Times are wall clock ns since 1970, 0 where something did not happen yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from dora_pipe.ui.course import Filling

PHASES: Final = ("queued", "worker", "siblings", "batch", "training")
"""Where the time of a trained trajectory went, from its dispatch to its commit: until it was placed
first; until it was logged; until its group's last sibling was; until a batch took the group; until
that step was committed."""


class Placement(NamedTuple):
    """One attempt at a request."""

    at_ns: int
    worker: str
    epoch: int
    attempt: int
    resumed: int
    """Sampled tokens that it goes on from; 0 from the prompt."""
    reason: str


@dataclass(slots=True, kw_only=True)
class TrajectoryRow:
    """A sibling. `offset` is that of the record that counts, -1 while there is none."""

    trajectory: str
    placements: list[Placement] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    logged_ns: int = 0
    worker: str = ""
    tokens: int = 0
    """Sampled ones."""
    reward: float | None = None
    finish: str = ""
    partition: int = -1
    offset: int = -1
    running: int = -1
    """Role epoch of the worker that has it now; -1 for none."""


@dataclass(slots=True, kw_only=True)
class GroupRow:
    """A dispatched group; `fate` is `open` until it has ended."""

    group: str
    version: int
    deadline: int
    purpose: str
    index: int
    """Row of the data set."""
    reason: str
    dispatched_ns: int
    trajectories: tuple[TrajectoryRow, ...]
    fate: str = "open"
    why: str = ""
    step: int = -1
    taken_ns: int = 0
    ended_ns: int = 0


@dataclass(slots=True, kw_only=True)
class StepRow:
    """A committed step with the sums over its batch."""

    step: int
    attempt: int
    offset: int
    """Of the commit in control."""
    free_ns: int
    """When the trainer was free for it."""
    taken_ns: int
    committed_ns: int
    compute_s: float
    reason: str
    """Why its batch was taken then."""
    groups: tuple[str, ...]
    means: tuple[float, ...]
    """Mean valid reward of every group that has one."""
    rewards: int
    """Trajectories with a valid reward."""
    reward_sum: float
    invalid: int
    """Trajectories without a valid reward."""
    staleness: tuple[int, ...]
    """Of every group."""
    bound: int
    """The largest staleness that any of its groups was allowed."""
    tokens: tuple[int, ...]
    """Sampled tokens of every trajectory, sorted."""
    figures: dict[str, float]
    settings: dict[str, float | int | str | bool]
    digest_before: str
    digest_after: str
    contributions: str
    """sha256 of the file."""
    adopted: bool

    @property
    def waited_s(self) -> float:
        """From when the trainer was free until its batch was there."""
        return max(0, self.taken_ns - self.free_ns) / 1e9


class Stay(NamedTuple):
    """A worker's time with one version: loading its weights from `from_ns` to `ready_ns`."""

    version: int
    from_ns: int
    ready_ns: int


@dataclass(slots=True, kw_only=True)
class WorkerRow:
    """One incarnation of a worker."""

    worker: str
    epoch: int
    engine: str
    slots: int
    joined_ns: int
    filling: Filling
    gone_ns: int = 0
    gone_why: str = ""
    trajectories: int = 0
    tokens: int = 0
    stays: list[Stay] = field(default_factory=list)


class DecisionRow(NamedTuple):
    """A decision, an observation, or a fact that is worth being told."""

    at_ns: int
    round: int
    """-1 for facts."""
    kind: str
    subject: str
    """The worker, group, trajectory or step it is about."""
    reason: str
