"""Ledger of groups as audit keeps it: it reports what contradicts the log and spills what ended.

`Sums` has the totals of spilled groups.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dora_pipe.audit.findings import Findings
from dora_pipe.audit.spill import SpillDict, SpillFile
from dora_pipe.ledger.groups import GroupLedger
from dora_pipe.ledger.history import GroupHistory, RecordLogged, WorkerHistory
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.control import TrajectoryLogged, WorkerJoined
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.rounds import Outcome

Bucket = tuple[int, int]


def bucket_of(tokens: int) -> Bucket:
    """Return the power-of-two bucket: ``bucket_of(20) == (17, 32)``, ``bucket_of(1) == (1, 1)``."""
    if tokens == 0:
        return 0, 0
    high = 1 << (tokens - 1).bit_length()
    return high // 2 + 1, high


@dataclass(slots=True, kw_only=True)
class Sums:
    groups: Counter[str] = field(default_factory=Counter)
    trajectories: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    bounds: Counter[int] = field(default_factory=Counter)
    """By deadline minus version."""
    lengths: Counter[tuple[Bucket, str]] = field(default_factory=Counter)
    length_tokens: Counter[Bucket] = field(default_factory=Counter)
    engines: Counter[int] = field(default_factory=Counter)
    engine_tokens: Counter[int] = field(default_factory=Counter)

    def add(self, group: GroupHistory, times: int = 1) -> None:
        outcome, bound = group.outcome or "open", group.bound
        self.groups[outcome] += times
        self.trajectories[outcome] += times * len(bound)
        self.tokens[outcome] += times * group.tokens
        spec = group.spec
        if group.step is not None:
            self.staleness[staleness_of(group.step, spec.version)] += times
            self.bounds[spec.deadline - spec.version] += times
        for record in bound:
            self.engines[record.engine] += times
            self.engine_tokens[record.engine] += times * record.fact.tokens
        if spec.purpose == "train":
            for request in group.requests.values():
                tokens = 0 if request.bound is None else request.bound.fact.tokens
                bucket = bucket_of(tokens)
                self.lengths[bucket, request.left or outcome] += times
                self.length_tokens[bucket] += times * tokens


class AuditedGroups(GroupLedger):
    """Ledger of groups that adds findings; calls `on_sample_ended` per ended trajectory."""

    def __init__(self, findings: Findings, file: SpillFile) -> None:
        super().__init__()
        self._findings = findings
        self.groups: SpillDict[str, GroupHistory] = SpillDict(
            file, "group", GroupHistory, self._fetched
        )
        self.workers: SpillDict[int, WorkerHistory] = SpillDict(file, "worker", WorkerHistory)
        self._packages: dict[str, set[str]] = {}
        """Versions by environment package."""
        self.records = 0
        self.unread: dict[tuple[int, int], RecordLogged] = {}
        """Not checked yet; the checker removes them."""
        self.ended: dict[str, None] = {}
        """Groups that ended or had events after their end; cleared by `settle`."""
        self.sums = Sums()
        self.on_sample_ended: Callable[[GroupHistory], None] = lambda group: None

    def wrong(
        self,
        check: Literal["C2", "control"],
        subject: str,
        message: str,
        *,
        expected: object = "",
        actual: object = "",
    ) -> None:
        self._findings.add(check, subject, message, expected=expected, actual=actual)

    def sample_ended(self, group: GroupHistory) -> None:
        self.on_sample_ended(group)

    def log(self, offset: int, fact: TrajectoryLogged) -> RecordLogged | None:
        logged = super().log(offset, fact)
        if logged is not None and self.logged.get(logged.place) is logged:
            self.records += 1
            self.unread[logged.place] = logged
            name = group_of(fact.trajectory)
            if name not in self.open:
                self.ended[name] = None
        return logged

    def end(
        self, name: str, outcome: Outcome, why: str, *, step: int | None = None, part: int = 0
    ) -> GroupHistory | None:
        group = super().end(name, outcome, why, step=step, part=part)
        if group is not None:
            self.ended[name] = None
        return group

    def was_placed(self, trajectory: str, incarnation: int) -> bool:
        """Report whether it was ever placed on this incarnation."""
        request = self.request(trajectory)
        return request is not None and any(
            attempt.incarnation == incarnation for attempt in request.attempts
        )

    def summed(self) -> Sums:
        sums = copy.deepcopy(self.sums)
        for group in self.groups.values():
            sums.add(group)
        return sums

    def settle(self) -> list[GroupHistory]:
        """Return the groups that ended since the last call."""
        ended = [self.groups[name] for name in self.ended]
        self.ended = {}
        return ended

    def spill(self, groups: Sequence[GroupHistory]) -> None:
        """Spill ended groups and departed workers."""
        self.workers.spill([worker.incarnation for worker in self.workers.values() if worker.gone])
        for group in groups:
            self.sums.add(group)
            for record in group.records:
                del self.logged[record.place]
            for request in group.requests.values():
                request.bound = None  # encodes each record once
        self.groups.spill(group.spec.group for group in groups)

    def _fetched(self, group: GroupHistory) -> None:
        """Subtract a reloaded group from the totals."""
        for record in group.records:
            self.logged[record.place] = record
            if record.status == "bound":
                group.requests[record.fact.trajectory].bound = record
        self.sums.add(group, -1)
        self.ended[group.spec.group] = None

    def note_packages(self, fact: WorkerJoined) -> None:
        """Note environment packages of which workers have several versions."""
        for name, version in fact.packages.items():
            versions = self._packages.setdefault(name, set())
            for other in sorted(versions - {version}):
                first, second = sorted((version, other))
                note = f"workers have different versions of {name}: {first} and {second}"
                if note not in self._findings.notes:
                    self._findings.notes.append(note)
            versions.add(version)
