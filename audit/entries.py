"""Entries of the ledger: groups, requests, records, steps, versions.

Entries as numerous as trajectories are Structs, which are fast to create and encode.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dora_pipe.schemas.control import (
    GroupScored,
    Resume,
    ScoredSibling,
    StepCommitted,
    TakenTrajectory,
    TrajectoryLogged,
    WorkerJoined,
)
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.rounds import Fate, GroupSpec, ScoreGroup, SiblingFate, TakeBatch

Standing = Literal["bound", "superseded", "fenced"]
"""Standing of a logged trajectory: counts for its group; replaced by another; its worker was out.
"""

Departure = Literal["", "fenced", "left", "replaced"]


class Moment(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Place in the log where a decision or an event took effect.

    Example: ``Moment(round=12, offset=31, now_ns=8_000_000_000)``. `round` is -1 for unfolded
    events; `offset` is that of the record in its topic.
    """

    round: int
    offset: int
    now_ns: int


class Placement(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """One attempt at a request."""

    attempt: int
    worker: str
    epoch: int
    resume: Resume | None
    reason: str
    at: Moment


class Logged(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A `trajectory logged` with its standing."""

    fact: TrajectoryLogged
    standing: Standing
    at: Moment
    engine: int
    """Index of its engine in `GroupLedger.engines`."""

    @property
    def place(self) -> tuple[int, int]:
        """Partition and offset of the record."""
        return self.fact.partition, self.fact.offset

    @property
    def taken(self) -> TakenTrajectory:
        """The record as batches name it."""
        fact = self.fact
        return TakenTrajectory(
            trajectory=fact.trajectory,
            attempt=fact.attempt,
            epoch=fact.epoch,
            partition=fact.partition,
            offset=fact.offset,
            sha256=fact.sha256,
        )


class RequestEntry(msgspec.Struct, kw_only=True, array_like=True):
    """One trajectory of a group, with its attempts."""

    trajectory: str
    placements: list[Placement] = []
    bound: Logged | None = None
    errors: list[str] = []
    """Errors of failed attempts: ``attempt 2: Timeout: ...``."""
    moving: bool = False
    """Its worker was asked to release it."""
    waiting: bool = False
    """Its newest attempt lost its worker; it waits for another placement."""
    faults: int = 0
    """Attempts that ended in an error or with the loss of the worker."""
    failed: bool = False
    """It failed for good: not retryable, or no attempts left."""
    trained: int | None = None
    """Step that trained it."""
    left: SiblingFate | None = None
    """Its own outcome, if the group did not wait for it."""
    left_ns: int = 0
    """Round time of `left`."""

    @property
    def runs(self) -> bool:
        """Report whether its newest attempt has neither ended nor lost its worker."""
        return bool(self.placements) and not (self.waiting or self.over)

    @property
    def over(self) -> bool:
        """Report whether it has ended."""
        return self.bound is not None or self.failed or self.left is not None

    def was_placed(self, attempt: int, worker: str, epoch: int) -> bool:
        wanted = (attempt, worker, epoch)
        return any((one.attempt, one.worker, one.epoch) == wanted for one in self.placements)


class Scoring(msgspec.Struct, kw_only=True, array_like=True):
    """Scoring of a group whose trajectories are scored together."""

    asked: list[ScoreGroup] = []
    open: bool = False
    """Its newest attempt is neither answered nor lost."""
    faults: int = 0
    failed: bool = False
    """It failed for good: no trajectory of the group has a valid reward."""
    answer: GroupScored | None = None
    """The answer that counts."""

    @property
    def siblings(self) -> dict[str, ScoredSibling]:
        """Scores of the answer, by trajectory."""
        return {} if self.answer is None else {one.trajectory: one for one in self.answer.siblings}

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards of the answer, by trajectory."""
        return {name: one.reward for name, one in self.siblings.items()}

    def was_asked(self, attempt: int, worker: str, epoch: int) -> ScoreGroup | None:
        """Return the decision that asked this incarnation under this attempt."""
        wanted = (attempt, worker, epoch)
        found = (one for one in self.asked if (one.attempt, one.worker, one.epoch) == wanted)
        return next(found, None)


class GroupEntry(msgspec.Struct, kw_only=True, array_like=True):
    """A dispatched group with its trajectories."""

    spec: GroupSpec
    reason: str
    at: Moment
    requests: dict[str, RequestEntry] = {}
    taken: tuple[int, int] | None = None
    """(step, attempt) of the batch that contains it."""
    fate: Fate | None = None
    why: str = ""
    step: int | None = None
    ended: Moment | None = None
    records: list[Logged] = []
    """All its logged records of any standing, in fold order."""
    scoring: Scoring | None = None
    """Set if its trajectories are scored together."""
    expired: bool = False
    """It exceeded the group timeout."""
    part: int = 0
    """Part of the batch that trained it, from 1; 0 if the batch had no parts."""

    @property
    def closed(self) -> SiblingFate | None:
        """Outcome of its open trajectories, if it waits for none of them: enough were valid, or it
        timed out."""
        if self.expired:
            return "expired"
        if not self.spec.spare:
            return None
        bound = (entry.bound for entry in self.requests.values())
        valid = sum(one is not None and one.fact.reward is not None for one in bound)
        return "surplus" if valid >= self.spec.size else None

    @property
    def open_siblings(self) -> tuple[int, ...]:
        """Indices of trajectories that have not ended."""
        named = enumerate(sorted(self.requests))
        return tuple(place for place, name in named if not self.requests[name].over)

    @property
    def results(self) -> list[Logged]:
        """Bound records, ordered by trajectory."""
        entries = (self.requests[trajectory] for trajectory in sorted(self.requests))
        return [entry.bound for entry in entries if entry.bound is not None]

    def reward_of(self, fact: TrajectoryLogged) -> float | None:
        """Return the reward of a bound record: from group scoring, or its own."""
        if self.scoring is None:
            return fact.reward
        found = self.scoring.siblings.get(fact.trajectory)
        return fact.reward if found is None else found.reward

    @property
    def tokens(self) -> int:
        """Sampled tokens of the bound records."""
        return sum(logged.fact.tokens for logged in self.results)


@dataclass(slots=True, kw_only=True)
class EngineEntry:
    """One kind of engine, with its incarnations and missing capabilities."""

    number: int
    workers: int = 0
    missing: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class WorkerEntry:
    """One incarnation of a worker."""

    joined: WorkerJoined
    epoch: int
    hosted: dict[int, int] = field(default_factory=dict)
    """Offset in control at which each version was first ready."""
    target: int = -1
    assigned: set[int] = field(default_factory=set)
    """Versions assigned to it, from those of open groups on."""
    held: set[int] = field(default_factory=set)
    """Versions it serves at once, if it can serve several."""
    awake: bool = False
    """It was assigned a version and has not reported sleep since."""
    departure: Departure = ""
    departed: Moment | None = None

    @property
    def several(self) -> bool:
        """Report whether it serves several versions at once."""
        return self.joined.versions_resident > 1

    @property
    def out(self) -> str:
        """How it left, as the end of a sentence."""
        return "left" if self.departure == "left" else "was fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch decision with its place in the log."""

    take: TakeBatch
    at: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """A `step committed` with the decision it executes, if any."""

    fact: StepCommitted
    at: Moment
    take: TakeBatch | None
    taken_at: Moment | None

    @property
    def step(self) -> int:
        return self.fact.step


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEntry:
    """A published version: 0 by `run started`, v by the commit of step v - 1."""

    version: int
    manifest: Manifest
    at: Moment

    @property
    def digest(self) -> str:
        """Weights digest (hex)."""
        return self.manifest.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """A batch decision that was refused or overtaken by a newer attempt."""

    step: int
    attempt: int
    why: str


@dataclass(slots=True, kw_only=True)
class Hosting:
    """Time in which several versions were served at once, by the round clock.

    A worker serves a version from the round that folds its `worker ready` to the round that folds
    the next one, its leaving or its fencing.
    """

    hosts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Versions by incarnation."""
    now_ns: int | None = None
    span_ns: int = 0
    several_ns: int = 0

    def advance(self, now_ns: int) -> None:
        """Advance to a round's time; time that goes back adds nothing."""
        if self.now_ns is not None and now_ns > self.now_ns:
            self.span_ns += now_ns - self.now_ns
            if len({one for held in self.hosts.values() for one in held}) > 1:
                self.several_ns += now_ns - self.now_ns
        self.now_ns = now_ns if self.now_ns is None else max(now_ns, self.now_ns)

    def ready(self, epoch: int, *versions: int) -> None:
        """Set the versions that an incarnation serves from now on."""
        self.hosts[epoch] = versions

    def keep(self, epochs: Collection[int]) -> None:
        """Forget all other incarnations."""
        self.hosts = {epoch: one for epoch, one in self.hosts.items() if epoch in epochs}

    @property
    def seconds(self) -> float:
        """Seconds from the first round to the last."""
        return self.span_ns / 1e9

    @property
    def several_seconds(self) -> float:
        """Seconds in which at least two versions were served."""
        return self.several_ns / 1e9
