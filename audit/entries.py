"""Entries of the ledger; numerous ones are Structs for speed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from dora_pipe.schemas.control import (
    GroupScored,
    Resume,
    ScoredSample,
    StepCommitted,
    TakenTrajectory,
    TrajectoryLogged,
    WorkerJoined,
)
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.rounds import GroupSpec, Outcome, SampleOutcome, ScoreGroup, TakeBatch

Standing = Literal["bound", "superseded", "fenced"]
"""Counts for its group; replaced by another; its worker was out."""

Departure = Literal["", "fenced", "left", "replaced"]


class Moment(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Place in the log where something took effect.

    Example: ``Moment(round=12, offset=31, now_ns=8_000_000_000)``; `round` is -1 for unfolded
    events.
    """

    round: int
    offset: int
    now_ns: int


class Placement(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    attempt: int
    worker: str
    incarnation: int
    resume: Resume | None
    reason: str
    at: Moment


class Logged(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """A `trajectory logged` with its standing."""

    fact: TrajectoryLogged
    standing: Standing
    at: Moment
    engine: int
    """Index in `GroupLedger.engines`."""

    @property
    def place(self) -> tuple[int, int]:
        return self.fact.partition, self.fact.offset

    @property
    def taken(self) -> TakenTrajectory:
        fact = self.fact
        return TakenTrajectory(
            trajectory=fact.trajectory,
            attempt=fact.attempt,
            incarnation=fact.incarnation,
            partition=fact.partition,
            offset=fact.offset,
            sha256=fact.sha256,
        )


class RequestEntry(msgspec.Struct, kw_only=True, array_like=True):
    """A trajectory of a group, with its attempts."""

    trajectory: str
    placements: list[Placement] = []
    bound: Logged | None = None
    errors: list[str] = []
    moving: bool = False
    """Its worker must release it."""
    waiting: bool = False
    """It lost its worker and waits for a placement."""
    faults: int = 0
    """Attempts lost by error or with the worker."""
    failed: bool = False
    trained: int | None = None
    left: SampleOutcome | None = None
    """Its outcome if the group did not wait for it."""
    left_ns: int = 0

    @property
    def runs(self) -> bool:
        """Report whether its newest attempt is running."""
        return bool(self.placements) and not (self.waiting or self.over)

    @property
    def over(self) -> bool:
        return self.bound is not None or self.failed or self.left is not None

    def was_placed(self, attempt: int, worker: str, incarnation: int) -> bool:
        wanted = (attempt, worker, incarnation)
        return any((one.attempt, one.worker, one.incarnation) == wanted for one in self.placements)


class Scoring(msgspec.Struct, kw_only=True, array_like=True):
    """Scoring of a group as a whole."""

    asked: list[ScoreGroup] = []
    open: bool = False
    """Neither answered nor lost."""
    faults: int = 0
    failed: bool = False
    answer: GroupScored | None = None

    @property
    def samples(self) -> dict[str, ScoredSample]:
        return {} if self.answer is None else {one.trajectory: one for one in self.answer.samples}

    @property
    def rewards(self) -> dict[str, float]:
        return {name: one.reward for name, one in self.samples.items()}

    def was_asked(self, attempt: int, worker: str, incarnation: int) -> ScoreGroup | None:
        """Return the decision that asked this incarnation."""
        wanted = (attempt, worker, incarnation)
        found = (one for one in self.asked if (one.attempt, one.worker, one.incarnation) == wanted)
        return next(found, None)


class GroupEntry(msgspec.Struct, kw_only=True, array_like=True):
    """A dispatched group."""

    spec: GroupSpec
    reason: str
    at: Moment
    requests: dict[str, RequestEntry] = {}
    taken: tuple[int, int] | None = None
    """(step, attempt) of its batch."""
    outcome: Outcome | None = None
    why: str = ""
    step: int | None = None
    ended: Moment | None = None
    records: list[Logged] = []
    """All logged records in fold order."""
    scoring: Scoring | None = None
    expired: bool = False
    """Exceeded the group timeout."""
    part: int = 0
    """From 1; 0 if the batch had no parts."""

    @property
    def closed(self) -> SampleOutcome | None:
        """Outcome of open trajectories that it does not wait for."""
        if self.expired:
            return "expired"
        if not self.spec.redundancy:
            return None
        bound = (entry.bound for entry in self.requests.values())
        valid = sum(one is not None and one.fact.reward is not None for one in bound)
        return "redundant" if valid >= self.spec.size else None

    @property
    def open_samples(self) -> tuple[int, ...]:
        named = enumerate(sorted(self.requests))
        return tuple(place for place, name in named if not self.requests[name].over)

    @property
    def results(self) -> list[Logged]:
        """Bound records by trajectory."""
        entries = (self.requests[trajectory] for trajectory in sorted(self.requests))
        return [entry.bound for entry in entries if entry.bound is not None]

    def reward_of(self, fact: TrajectoryLogged) -> float | None:
        """Return the reward from group scoring, else the record's own."""
        if self.scoring is None:
            return fact.reward
        found = self.scoring.samples.get(fact.trajectory)
        return fact.reward if found is None else found.reward

    @property
    def tokens(self) -> int:
        return sum(logged.fact.tokens for logged in self.results)


@dataclass(slots=True, kw_only=True)
class EngineEntry:
    """A kind of engine."""

    number: int
    workers: int = 0
    missing: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class WorkerEntry:
    joined: WorkerJoined
    incarnation: int
    served: dict[int, int] = field(default_factory=dict)
    """Control offset at which each version was first ready."""
    target: int = -1
    assigned: set[int] = field(default_factory=set)
    """Versions assigned and still in use."""
    held: set[int] = field(default_factory=set)
    """Versions served at once."""
    awake: bool = False
    """Assigned a version, no sleep reported since."""
    departure: Departure = ""
    departed: Moment | None = None

    @property
    def several(self) -> bool:
        """Report whether it can serve several versions at once."""
        return self.joined.max_resident_versions > 1

    @property
    def out(self) -> str:
        """Departure, as the end of a sentence."""
        return "left" if self.departure == "left" else "was fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch decision with its place in the log."""

    take: TakeBatch
    at: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """A `step committed` with its decision, if any."""

    fact: StepCommitted
    at: Moment
    take: TakeBatch | None
    taken_at: Moment | None

    @property
    def step(self) -> int:
        return self.fact.step


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionEntry:
    """A published version; `run started` publishes 0."""

    version: int
    manifest: Manifest
    at: Moment

    @property
    def digest(self) -> str:
        """Weights digest (hex)."""
        return self.manifest.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempted:
    """A batch that was refused or overtaken."""

    step: int
    attempt: int
    why: str


@dataclass(slots=True, kw_only=True)
class Serving:
    """Time with several versions served, by the round clock."""

    hosts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    now_ns: int | None = None
    span_ns: int = 0
    several_ns: int = 0

    def advance(self, now_ns: int) -> None:
        """Advance to a round's time; ignores time that goes back."""
        if self.now_ns is not None and now_ns > self.now_ns:
            self.span_ns += now_ns - self.now_ns
            if len({one for held in self.hosts.values() for one in held}) > 1:
                self.several_ns += now_ns - self.now_ns
        self.now_ns = now_ns if self.now_ns is None else max(now_ns, self.now_ns)

    def ready(self, incarnation: int, *versions: int) -> None:
        """Set the versions that an incarnation serves."""
        self.hosts[incarnation] = versions

    def keep(self, incarnations: Collection[int]) -> None:
        self.hosts = {
            incarnation: one
            for incarnation, one in self.hosts.items()
            if incarnation in incarnations
        }

    @property
    def seconds(self) -> float:
        return self.span_ns / 1e9

    @property
    def several_seconds(self) -> float:
        """Seconds with at least two versions served."""
        return self.several_ns / 1e9
