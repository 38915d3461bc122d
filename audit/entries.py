"""What the ledger writes down of a run: groups, requests, records, steps, versions; only values.

What there is as many of as of trajectories is a Struct: it is made and written often.
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
"""Of a logged trajectory: part of its group's result; another one is; its worker was out."""

Departure = Literal["", "fenced", "left", "replaced"]


class Moment(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False):
    """Where in the log a decision or a fact took effect.

    Example: ``Moment(round=12, offset=31, now_ns=8_000_000_000)``; `round` is -1 for facts that no
    round has folded yet, `offset` that of the record in its own topic.
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
    """Number of the engine that made it, in `GroupLedger.engines`."""

    @property
    def place(self) -> tuple[int, int]:
        """Partition and offset of the record it names."""
        return self.fact.partition, self.fact.offset

    @property
    def taken(self) -> TakenTrajectory:
        """As batches name it."""
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
    """One sibling of a group: its attempts and what came of them."""

    trajectory: str
    placements: list[Placement] = []
    bound: Logged | None = None
    errors: list[str] = []
    """Of failed attempts: ``attempt 2: Timeout: ...``."""
    moving: bool = False
    """Its worker was asked to let go of it."""
    waiting: bool = False
    """Its newest attempt lost its worker; it queues for another placement."""
    faults: int = 0
    """Attempts that ended in an error or with the loss of the worker."""
    failed: bool = False
    """It failed for good: not retryable, or all its attempts were used."""
    trained: int | None = None
    """Step that trained it."""
    left: SiblingFate | None = None
    """How it ended, where its group did not wait for it."""
    left_ns: int = 0
    """Round time of that."""

    @property
    def runs(self) -> bool:
        """Whether its newest attempt has neither ended nor lost its worker."""
        return bool(self.placements) and not (self.waiting or self.over)

    @property
    def over(self) -> bool:
        """Whether it has ended, in whichever way of its own."""
        return self.bound is not None or self.failed or self.left is not None

    def was_placed(self, attempt: int, worker: str, epoch: int) -> bool:
        wanted = (attempt, worker, epoch)
        return any((one.attempt, one.worker, one.epoch) == wanted for one in self.placements)


class Scoring(msgspec.Struct, kw_only=True, array_like=True):
    """Of a group whose siblings are scored together: who was asked, and what came of it."""

    asked: list[ScoreGroup] = []
    open: bool = False
    """Its newest attempt is neither answered nor lost."""
    faults: int = 0
    failed: bool = False
    """It failed for good: none of its siblings has a reward that counts."""
    answer: GroupScored | None = None
    """That which counts."""

    @property
    def siblings(self) -> dict[str, ScoredSibling]:
        """What that says, by trajectory."""
        return {} if self.answer is None else {one.trajectory: one for one in self.answer.siblings}

    @property
    def rewards(self) -> dict[str, float]:
        """What each counts."""
        return {name: one.reward for name, one in self.siblings.items()}

    def was_asked(self, attempt: int, worker: str, epoch: int) -> ScoreGroup | None:
        """The decision that asked this incarnation under this attempt."""
        wanted = (attempt, worker, epoch)
        found = (one for one in self.asked if (one.attempt, one.worker, one.epoch) == wanted)
        return next(found, None)


class GroupEntry(msgspec.Struct, kw_only=True, array_like=True):
    """A dispatched group with its siblings."""

    spec: GroupSpec
    reason: str
    at: Moment
    requests: dict[str, RequestEntry] = {}
    taken: tuple[int, int] | None = None
    """(step, attempt) of the batch that holds it now."""
    fate: Fate | None = None
    why: str = ""
    step: int | None = None
    ended: Moment | None = None
    records: list[Logged] = []
    """Everything that was logged of it, whatever its standing, in the order of the fold."""
    scoring: Scoring | None = None
    """Where its siblings are scored together."""
    expired: bool = False
    """It was open for longer than groups may be."""
    part: int = 0
    """Where it was trained in a batch that was taken in parts: in which, from 1 on."""

    @property
    def closed(self) -> SiblingFate | None:
        """What becomes of its siblings that are still open, where it waits for none of them: as
        many as it is complete with were valid before, or its time is over."""
        if self.expired:
            return "expired"
        if not self.spec.spare:
            return None
        bound = (entry.bound for entry in self.requests.values())
        valid = sum(one is not None and one.fact.reward is not None for one in bound)
        return "surplus" if valid >= self.spec.size else None

    @property
    def open_siblings(self) -> tuple[int, ...]:
        """Those that have not ended, in order."""
        named = enumerate(sorted(self.requests))
        return tuple(place for place, name in named if not self.requests[name].over)

    @property
    def results(self) -> list[Logged]:
        """The bound records, in order of the siblings."""
        entries = (self.requests[trajectory] for trajectory in sorted(self.requests))
        return [entry.bound for entry in entries if entry.bound is not None]

    def reward_of(self, fact: TrajectoryLogged) -> float | None:
        """What a bound record counts: what its siblings were scored together with, or its own."""
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
    """One kind of engine: the incarnations that had it, and the capabilities it lacks."""

    number: int
    workers: int = 0
    missing: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class WorkerEntry:
    """One incarnation of a worker."""

    joined: WorkerJoined
    epoch: int
    hosted: dict[int, int] = field(default_factory=dict)
    """Version to the offset in control at which it was first ready."""
    target: int = -1
    assigned: set[int] = field(default_factory=set)
    """Versions that decisions gave it, from those on that open groups carry."""
    held: set[int] = field(default_factory=set)
    """Versions that it has beside each other, where it hosts several at once."""
    awake: bool = False
    """It was assigned a version, and has not said since that it sleeps."""
    departure: Departure = ""
    departed: Moment | None = None

    @property
    def several(self) -> bool:
        """Whether it hosts several versions at once."""
        return self.joined.versions_resident > 1

    @property
    def out(self) -> str:
        """How it went, as the end of a sentence."""
        return "left" if self.departure == "left" else "was fenced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch decision where it was made."""

    take: TakeBatch
    at: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry:
    """A `step committed` where it lies, with the decision it carries out (if there was one)."""

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
    """A batch decision that was not carried out: refused, or overtaken by a newer attempt."""

    step: int
    attempt: int
    why: str


@dataclass(slots=True, kw_only=True)
class Hosting:
    """Sums up how long several versions were hosted at once, by the clock of the rounds.

    A worker hosts a version from the round that folds its `worker ready` to the round that folds
    the next one, its leaving or its fencing.
    """

    hosts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Versions by incarnation."""
    now_ns: int | None = None
    span_ns: int = 0
    several_ns: int = 0

    def advance(self, now_ns: int) -> None:
        """A round at this time; time that goes back adds nothing."""
        if self.now_ns is not None and now_ns > self.now_ns:
            self.span_ns += now_ns - self.now_ns
            if len({one for held in self.hosts.values() for one in held}) > 1:
                self.several_ns += now_ns - self.now_ns
        self.now_ns = now_ns if self.now_ns is None else max(now_ns, self.now_ns)

    def ready(self, epoch: int, *versions: int) -> None:
        """This incarnation hosts these versions from now on; one, unless it hosts several."""
        self.hosts[epoch] = versions

    def keep(self, epochs: Collection[int]) -> None:
        """Incarnations that are not among these host nothing any more."""
        self.hosts = {epoch: one for epoch, one in self.hosts.items() if epoch in epochs}

    @property
    def seconds(self) -> float:
        """From the first round to the last."""
        return self.span_ns / 1e9

    @property
    def several_seconds(self) -> float:
        """Seconds in which at least two versions were hosted."""
        return self.several_ns / 1e9
