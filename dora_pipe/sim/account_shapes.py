"""The shapes of the account that the checkers keep of a run; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dora_pipe.schemas.control import Resume, TakenGroup, TakenTrajectory, WorkerJoined
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import GroupSpec

Phase = Literal["generating", "finished", "doomed", "taken", "over"]


@dataclass(slots=True)
class WorkerAccount:
    """An incarnation of a worker."""

    name: str
    epoch: int
    slots: int
    prefetch: int
    target: int = -1
    hosted: int = -1
    out: str = ""
    """`left`, `fenced` or `replaced`; empty while it counts."""
    silent: bool = False
    draining: bool = False
    requests: set[str] = field(default_factory=set)
    most: int = 1
    """Versions that it hosts at once."""
    held: set[int] = field(default_factory=set)
    """Those that it has reported and was not told to drop, if it hosts several."""

    def ready(self, version: int) -> None:
        """It has reported its target."""
        self.hosted = version
        if self.most > 1:
            self.held.add(version)

    def has(self, version: int) -> bool:
        """Whether requests of a version may be placed there."""
        if self.most > 1:
            return version in self.held
        return self.target == self.hosted == version


def account_of(epoch: int, record: WorkerJoined) -> WorkerAccount:
    """An incarnation that has just joined."""
    most = record.versions_resident
    return WorkerAccount(record.worker, epoch, record.slots, record.prefetch, most=most)


@dataclass(slots=True)
class RequestAccount:
    """A sibling: queued (`epoch` -1), placed, or over."""

    group: str
    sibling: int
    attempt: int = 0
    faults: int = 0
    epoch: int = -1
    over: bool = False
    resume: Resume | None = None
    known_tokens: int = 0
    """How far its lost worker had said it was: it goes on from there or later."""
    moving: tuple[str, int] | None = None
    kv: Blob | None = None
    """The KV cache that a move left behind, until it is placed again."""


@dataclass(slots=True)
class GroupAccount:
    """A group and how its siblings ended."""

    spec: GroupSpec
    results: dict[int, TakenTrajectory | None] = field(default_factory=dict)
    rewards: dict[int, float | None] = field(default_factory=dict)
    phase: Phase = "generating"
    fate: str = ""
    due_fate: str = ""
    """The fate that a doomed group has to get."""

    @property
    def in_u(self) -> bool:
        """Whether it counts against the bound."""
        return self.spec.purpose == "train" and self.phase in ("generating", "finished")

    @property
    def place(self) -> tuple[int, int]:
        """Its place in line for a batch."""
        return self.spec.deadline, self.spec.ordinal

    def taken(self) -> TakenGroup:
        """As a batch has to list it."""
        found = [self.results[sibling] for sibling in sorted(self.results)]
        return TakenGroup(
            group=self.spec.group,
            version=self.spec.version,
            deadline=self.spec.deadline,
            trajectories=tuple(one for one in found if one is not None),
        )
