"""Ledger of groups as audit keeps it: it reports what contradicts the log and spills what ended.

`SpillDict` loads spilled entries on access, and `Sums` has their totals.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from dora_pipe.audit.findings import Findings
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


K = TypeVar("K")
Key = TypeVar("Key", contravariant=True)
V = TypeVar("V")


class Storage(Protocol[Key, V]):
    """Disk storage of one kind of entry."""

    def keeps(self, key: Key) -> bool: ...

    def fetch(self, key: Key) -> V | None: ...

    def store(self, entries: Iterable[tuple[Key, V]]) -> None: ...


class SpillDict(dict[K, V]):
    """Dictionary with spilled entries; iteration, `values` and `len` skip those."""

    storage: Storage[K, V] | None = None
    on_fetch: Callable[[V], None] | None = None
    """Called with each loaded entry."""

    def __missing__(self, key: K) -> V:
        entry = self._fetch(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._fetch(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        entry: Any = dict.get(self, key)
        if entry is None:
            entry = self._fetch(key)
        return default if entry is None else entry

    def spill(self, keys: Iterable[K]) -> list[V]:
        """Spill these entries, if there is a storage; return the spilled ones."""
        storage = self.storage
        if storage is None:
            return []
        spilled = [(key, self[key]) for key in keys if dict.__contains__(self, key)]
        spilled = [(key, entry) for key, entry in spilled if storage.keeps(key)]
        storage.store(spilled)
        for key, _ in spilled:
            del self[key]
        return [entry for _, entry in spilled]

    def _fetch(self, key: Any) -> V | None:
        if self.storage is None:
            return None
        entry = self.storage.fetch(key)
        if entry is not None:
            self[key] = entry
            if self.on_fetch is not None:
                self.on_fetch(entry)
        return entry


class AuditedGroups(GroupLedger):
    """Ledger of groups that adds findings; calls `on_sample_ended` per ended trajectory."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings
        self.groups: SpillDict[str, GroupHistory] = SpillDict()
        self.groups.on_fetch = self.fetched
        self.workers: SpillDict[int, WorkerHistory] = SpillDict()
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

    def spill(self, groups: Iterable[GroupHistory]) -> None:
        """Spill ended groups and departed workers, if there is a storage."""
        self.workers.spill([worker.incarnation for worker in self.workers.values() if worker.gone])
        for group in self.groups.spill(group.spec.group for group in groups):
            self.sums.add(group)
            for record in group.records:
                del self.logged[record.place]

    def fetched(self, group: GroupHistory) -> None:
        """Subtract a reloaded group from the totals."""
        self.sums.add(group, -1)
        self.ended[group.spec.group] = None
        for record in group.records:
            self.logged[record.place] = record

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
