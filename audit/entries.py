"""Entries of audit's ledger for batches, steps and versions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from dora_pipe.ledger.history import Moment
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.rounds import TakeBatch


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
            if len({version for held in self.hosts.values() for version in held}) > 1:
                self.several_ns += now_ns - self.now_ns
        self.now_ns = now_ns if self.now_ns is None else max(now_ns, self.now_ns)

    def ready(self, incarnation: int, *versions: int) -> None:
        """Set the versions that an incarnation serves."""
        self.hosts[incarnation] = versions

    def keep(self, incarnations: Collection[int]) -> None:
        self.hosts = {
            incarnation: versions
            for incarnation, versions in self.hosts.items()
            if incarnation in incarnations
        }

    @property
    def seconds(self) -> float:
        return self.span_ns / 1e9

    @property
    def several_seconds(self) -> float:
        """Seconds with at least two versions served."""
        return self.several_ns / 1e9
