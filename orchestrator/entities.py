"""Entities of the orchestrator's state: groups, requests and workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from dora_pipe.orchestrator.staleness import Finished
from dora_pipe.schemas.control import Resume, TakenGroup, TakenTrajectory
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import NO_VERSION, GroupSpec, Outcome

Phase = Literal["generating", "scoring", "finished", "taken", "ending"]
"""Phase of an open group: trajectories run; all ended, scored together; complete and in U; in a
batch; outcome certain, `end` decision pending.

U contains the training groups in the first three phases, `UNTAKEN`.
"""

UNTAKEN: Final = ("generating", "scoring", "finished")

Drain = Literal["no", "asked", "told"]


class Request(msgspec.Struct, kw_only=True, gc=False):
    """Open trajectory: queued (`worker` is empty) or placed."""

    group: str
    sample: int
    attempt: int = 0
    """0 before the first placement."""
    faults: int = 0
    """Failed placements; bounded."""
    worker: str = ""
    incarnation: int = -1
    resume: Resume | None = None
    moving: tuple[str, int] | None = None
    """Destination of a move; an empty name is any free worker."""
    kv: Blob | None = None
    """KV cache of a move until the next placement."""
    moves: int = 0
    """Moves so far; bounded."""
    moved_ns: int = 0
    """Round time of the newest move."""
    began_ns: int = -1
    """Round time of the first placement."""


class Result(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Result of an ended trajectory; `taken` is empty if it failed."""

    taken: TakenTrajectory | None
    reward: float | None
    scored: bool = False
    """Whether the reward comes from scoring the group together."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Group outcome before its `end`."""

    outcome: Outcome
    why: str
    error: str = ""
    """Class and first line."""
    trajectory: str = ""
    """Trajectory with that error."""


class Group(msgspec.Struct, kw_only=True, gc=False):
    """Open group with its results by sample index."""

    spec: GroupSpec
    results: list[Result | None]
    ended: int = 0
    valid: int = 0
    phase: Phase = "generating"
    verdict: Verdict | None = None

    @property
    def key(self) -> Finished:
        """Return the sort key among the finished groups."""
        return Finished(self.spec.deadline, self.spec.ordinal, self.spec.group)

    @property
    def rewards(self) -> list[float]:
        """Return the valid rewards, by sample index."""
        rewards = (result.reward for result in self.results if result is not None)
        return [reward for reward in rewards if reward is not None]

    def taken(self) -> TakenGroup:
        """Return the group as a batch lists it, trajectories in order."""
        ended = [
            result for result in self.results if result is not None and result.taken is not None
        ]
        return TakenGroup(
            group=self.spec.group,
            version=self.spec.version,
            deadline=self.spec.deadline,
            trajectories=tuple([result.taken for result in ended if result.taken is not None]),
            rewards={
                result.taken.trajectory: result.reward
                for result in ended
                if result.scored and result.taken is not None and result.reward is not None
            },
        )


KV_PRESSURE: Final = 0.95
"""KV cache usage above which a worker gets no new requests and releases some."""

OPEN_TIMES: Final = 6
"""Maximum open requests as a multiple of slots plus prefetch. Each costs memory; a worker
rejects more than eight times as many."""

OPEN_MAX: Final = 4096
"""Cap of that maximum: a task pool takes 8192 concurrent calls."""


class Worker(msgspec.Struct, kw_only=True, gc=False):
    """Worker incarnation: its assignment (`target`) and last report (`served`)."""

    name: str
    incarnation: int
    slots: int
    prefetch: int
    target: int = -1
    """Assigned version; -1 before the first assignment."""
    digest: str = ""
    target_ns: int = 0
    """Round time of the last target change."""
    served: int = -1
    """Version last reported ready."""
    silent: bool = False
    """Whether the lease has expired."""
    drain: Drain = "no"
    requests: set[str] = msgspec.field(default_factory=set)
    """Ids of its open requests."""
    arriving: int = 0
    """Requests moving here; each reserves room."""
    leaving: int = 0
    """Requests moving away."""
    moves: bool = False
    """Whether it can release running requests."""
    kv_tokens: int = 0
    """Capacity of its KV cache in tokens."""
    pressed: int = 0
    """Tokens when last observed above the threshold; 0 if below."""
    load_ns: int = 0
    """Reported time to load its version."""
    off_engine: int = 0
    """Open requests that need no slot."""
    colocated: bool = False
    """Whether it is colocated with the trainer; see `orchestrator.colocated`."""

    @property
    def loading(self) -> bool:
        """Whether the target is not reported yet; such a worker is never retargeted."""
        return self.target != self.served

    @property
    def usable(self) -> bool:
        """Whether it may get anything."""
        return not self.silent and self.drain == "no"

    @property
    def present(self) -> int:
        """Requests placed or arriving, without those leaving."""
        return len(self.requests) - self.leaving + self.arriving

    @property
    def load(self) -> int:
        """Present requests that need a slot."""
        return max(0, len(self.requests) - self.leaving - self.off_engine) + self.arriving

    @property
    def free(self) -> int:
        """Free slots, at most the remaining open requests."""
        room = self.most - len(self.requests) - self.arriving
        return max(0, min(self.slots - self.load, room))

    @property
    def room(self) -> int:
        """Requests that may still be placed, prefetch included."""
        places = min(self.slots + self.prefetch + self.off_engine, self.most)
        return places - len(self.requests) - self.arriving

    @property
    def most(self) -> int:
        """Maximum open requests."""
        size = self.slots + self.prefetch
        return max(2 * size, min(OPEN_TIMES * size, OPEN_MAX))

    @property
    def open(self) -> bool:
        """Whether a request may be placed here."""
        return (  # Inlines `usable`: a plan asks thousands of times.
            self.target == self.served
            and not self.pressed
            and not self.silent
            and self.drain == "no"
            and self.room > 0
        )

    @property
    def awake(self) -> bool:
        """Whether it has or expects weights."""
        return max(self.target, self.served) > NO_VERSION

    @property
    def settled(self) -> bool:
        """Whether it is neither loading nor expecting requests."""
        return self.target == self.served and not self.arriving


@dataclass(slots=True, kw_only=True)
class Residence:
    """Versions of a worker that hosts several at once."""

    most: int
    """Maximum versions; at least 2."""
    held: list[int] = field(default_factory=list)
    """Versions it holds, sorted."""


@dataclass(slots=True, kw_only=True)
class Training:
    """Batch in training."""

    step: int
    attempt: int
    digest: str
    groups: tuple[str, ...]


class Scoring(msgspec.Struct, kw_only=True):
    """Scoring attempt of a group."""

    attempt: int = 0
    faults: int = 0
    """Failed attempts; bounded."""
    worker: str = ""
    """Empty while it waits."""
    incarnation: int = -1

    def by(self, worker: Worker) -> bool:
        """Report whether this incarnation scores it now."""
        return (self.worker, self.incarnation) == (worker.name, worker.incarnation)
