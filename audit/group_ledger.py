"""Ledger of groups, requests and workers.

1. The first `trajectory logged` of a request's current attempt, by an incarnation that is not out,
   is bound. Others are superseded, or fenced if their incarnation was out.
2. An attempt ends with its record, its failure, or the loss of its worker. Losses and retryable
   failures are faults; a request fails with `max_attempts` faults.

Ended entries may be spilled; `SpillDict` loads them on access, and `Sums` has their totals.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from dora_pipe.audit.entries import (
    Departure,
    EngineEntry,
    GroupEntry,
    Logged,
    Moment,
    Placement,
    RequestEntry,
    Scoring,
    Standing,
    WorkerEntry,
)
from dora_pipe.audit.findings import Findings
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.control import (
    GroupScored,
    RequestFailed,
    RequestReleased,
    TrajectoryLogged,
    WorkerJoined,
)
from dora_pipe.schemas.identity import group_of, trajectory_id
from dora_pipe.schemas.rounds import (
    Dispatch,
    EndSamples,
    Migrate,
    Outcome,
    ScheduledRequest,
    ScoreGroup,
)

CAPABILITIES: Final = ("counter_sampling", "batch_invariant", "prefill_exact", "kv_export")
"""Required for bit-equal replay."""

EngineKey = tuple[str, str, str, str]

Bucket = tuple[int, int]
"""Token range, both ends included."""


def bucket_of(tokens: int) -> Bucket:
    """Return the power-of-two bucket: ``bucket_of(20) == (17, 32)``, ``bucket_of(1) == (1, 1)``."""
    if tokens == 0:
        return 0, 0
    high = 1 << (tokens - 1).bit_length()
    return high // 2 + 1, high


@dataclass(slots=True, kw_only=True)
class Sums:
    """Totals over groups."""

    groups: Counter[str] = field(default_factory=Counter)
    trajectories: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    bounds: Counter[int] = field(default_factory=Counter)
    """By deadline minus version."""
    lengths: Counter[tuple[Bucket, str]] = field(default_factory=Counter)
    """By length and outcome."""
    length_tokens: Counter[Bucket] = field(default_factory=Counter)
    engines: Counter[int] = field(default_factory=Counter)
    """By engine of the record that counts."""
    engine_tokens: Counter[int] = field(default_factory=Counter)

    def add(self, group: GroupEntry, times: int = 1) -> None:
        outcome, results = group.outcome or "open", group.results
        self.groups[outcome] += times
        self.trajectories[outcome] += times * len(results)
        self.tokens[outcome] += times * group.tokens
        spec = group.spec
        if group.step is not None:
            self.staleness[staleness_of(group.step, spec.version)] += times
            self.bounds[spec.deadline - spec.version] += times
        for entry in group.requests.values():
            if entry.bound is not None:
                self.engines[entry.bound.engine] += times
                self.engine_tokens[entry.bound.engine] += times * entry.bound.fact.tokens
        if spec.purpose == "train":
            for entry in group.requests.values():
                tokens = 0 if entry.bound is None else entry.bound.fact.tokens
                bucket = bucket_of(tokens)
                self.lengths[bucket, entry.left or outcome] += times
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
        found = self._fetch(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._fetch(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        found: Any = dict.get(self, key)
        if found is None:
            found = self._fetch(key)
        return default if found is None else found

    def spill(self, keys: Iterable[K]) -> list[V]:
        """Spill these entries, if there is a storage; return the spilled ones."""
        storage = self.storage
        if storage is None:
            return []
        gone = [(key, self[key]) for key in keys if dict.__contains__(self, key)]
        gone = [(key, entry) for key, entry in gone if storage.keeps(key)]
        storage.store(gone)
        for key, _ in gone:
            del self[key]
        return [entry for _, entry in gone]

    def _fetch(self, key: Any) -> V | None:
        if self.storage is None:
            return None
        found = self.storage.fetch(key)
        if found is not None:
            self[key] = found
            if self.on_fetch is not None:
                self.on_fetch(found)
        return found


class GroupLedger:
    """Groups, requests and worker incarnations; calls `sample_ended` per ended trajectory."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self.groups: SpillDict[str, GroupEntry] = SpillDict()
        self.groups.on_fetch = self.fetched
        self.open: dict[str, GroupEntry] = {}
        """Groups without an outcome."""
        self.workers: SpillDict[int, WorkerEntry] = SpillDict()
        self.engines: dict[EngineKey, EngineEntry] = {}
        self._packages: dict[str, set[str]] = {}
        """Versions by environment package."""
        self.logged: dict[tuple[int, int], Logged] = {}
        """First log of each record, of groups in memory."""
        self.records = 0
        self.unread: dict[tuple[int, int], Logged] = {}
        """Not checked yet; the checker removes them."""
        self.ended: dict[str, None] = {}
        """Groups that ended or had events after their end; cleared by `settle`."""
        self.sums = Sums()
        self.max_attempts = 0
        """0 while unknown."""
        self.scored_together: frozenset[str] = frozenset()
        """Sources with group scoring."""
        self.sample_ended: Callable[[GroupEntry], None] = lambda group: None

    def request(self, trajectory: str) -> RequestEntry | None:
        name = group_of(trajectory)
        group = self.open.get(name) or self.groups.get(name)
        return None if group is None else group.requests.get(trajectory)

    def was_placed(self, trajectory: str, incarnation: int) -> bool:
        """Report whether it was ever placed on this incarnation."""
        entry = self.request(trajectory)
        return entry is not None and any(one.incarnation == incarnation for one in entry.placements)

    def summed(self) -> Sums:
        sums = copy.deepcopy(self.sums)
        for group in self.groups.values():
            sums.add(group)
        return sums

    def settle(self) -> list[GroupEntry]:
        """Return the groups that ended since the last call."""
        found = [self.groups[name] for name in self.ended]
        self.ended = {}
        return found

    def spill(self, groups: Iterable[GroupEntry]) -> None:
        """Spill ended groups and departed workers, if there is a storage."""
        self.workers.spill(
            [incarnation for incarnation, one in self.workers.items() if one.departure]
        )
        for group in self.groups.spill(group.spec.group for group in groups):
            self.sums.add(group)
            for logged in group.records:
                del self.logged[logged.place]

    def sampled_from(self, version: int) -> int:
        """Return the number of groups dispatched under a version."""
        return sum(group.spec.version == version for group in self.groups.values())

    def fetched(self, group: GroupEntry) -> None:
        """Subtract a reloaded group from the totals."""
        self.sums.add(group, -1)
        self.ended[group.spec.group] = None
        for logged in group.records:
            self.logged[logged.place] = logged

    def joined(self, fact: WorkerJoined, at: Moment) -> None:
        """Add an incarnation; it replaces an earlier one of that name."""
        for worker in self.workers.values():
            if worker.joined.worker == fact.worker and not worker.departure:
                self.depart(worker, "replaced", at)
        self._note_packages(fact)
        engine = self.engines.setdefault(_engine(fact), EngineEntry(number=len(self.engines)))
        engine.workers += 1
        engine.missing = tuple(one for one in CAPABILITIES if one not in fact.declares)
        self.workers[at.offset] = WorkerEntry(joined=fact, incarnation=at.offset)

    def _note_packages(self, fact: WorkerJoined) -> None:
        for name, version in fact.packages.items():
            known = self._packages.setdefault(name, set())
            others = known - {version}
            known.add(version)
            for other in sorted(others):
                one, another = sorted((version, other))
                note = f"workers played with different versions of {name}: {one} and {another}"
                if note not in self._findings.notes:
                    self._findings.notes.append(note)

    def depart(self, worker: WorkerEntry, departure: Departure, at: Moment) -> None:
        """Mark an incarnation as out and requeue its requests."""
        if worker.departure:
            return
        worker.departure, worker.departed = departure, at
        for group in list(self.open.values()):
            for entry in group.requests.values():
                if entry.placements and entry.placements[-1].incarnation == worker.incarnation:
                    self._lost(group, entry, fault=departure != "left")
            scoring = group.scoring
            if scoring and scoring.open and scoring.asked[-1].incarnation == worker.incarnation:
                self._not_scored(group, scoring, fault=departure != "left")

    def dispatched(self, decision: Dispatch, at: Moment) -> None:
        spec = decision.spec
        if spec.group in self.groups:
            self._findings.add("C2", spec.group, f"is dispatched a second time in round {at.round}")
            return
        samples = (trajectory_id(spec.group, sample) for sample in range(spec.samples))
        requests = {one: RequestEntry(trajectory=one) for one in samples}
        entry = GroupEntry(spec=spec, reason=decision.reason, at=at, requests=requests)
        if spec.source in self.scored_together:
            entry.scoring = Scoring()
        self.groups[spec.group] = self.open[spec.group] = entry

    def placed(self, decision: ScheduledRequest, at: Moment) -> None:
        name = decision.spec.group
        group = self.open.get(name) or self.groups.get(name)
        entry = None if group is None else group.requests.get(decision.trajectory)
        if entry is None:
            return
        entry.waiting, entry.moving = False, False
        placement = Placement(
            attempt=decision.attempt,
            worker=decision.worker,
            incarnation=decision.incarnation,
            resume=decision.resume,
            reason=decision.reason,
            at=at,
        )
        entry.placements.append(placement)

    def log(self, fact: TrajectoryLogged, at: Moment) -> None:
        """Book a record and its standing."""
        name = group_of(fact.trajectory)
        present = self.open.get(name)
        group = self.groups.get(name) if present is None else present
        worker = self.workers.get(fact.incarnation)
        entry = None if group is None else group.requests.get(fact.trajectory)
        if group is None or entry is None or worker is None:
            what = (
                "was never dispatched"
                if entry is None
                else f"incarnation {fact.incarnation} never joined"
            )
            self._wrong(at, f"logs {fact.trajectory}, but {what}")
            return
        if not entry.was_placed(fact.attempt, fact.worker, fact.incarnation):
            what = f"attempt {fact.attempt} of {fact.trajectory} by {fact.worker}"
            self._wrong(at, f"logs {what}, but no decision placed it there")
        awaited = present is not None and not present.closed
        standing = self._standing(fact, entry, worker, awaited)
        engine = self.engines[_engine(worker.joined)].number
        logged = Logged(fact=fact, standing=standing, at=at, engine=engine)
        place = fact.partition, fact.offset
        known = self.logged.get(place)
        if known is not None:
            # A writer without an acknowledgment repeats the append.
            if known.fact != fact:
                self._wrong(at, f"logs the record at {place} a second time, otherwise")
            return
        self.logged[place] = self.unread[place] = logged
        self.records += 1
        group.records.append(logged)
        if group.outcome is not None:
            self.ended[name] = None
        if standing == "bound":
            entry.bound = logged
            self.sample_ended(group)

    def _standing(
        self, fact: TrajectoryLogged, entry: RequestEntry, worker: WorkerEntry, awaited: bool
    ) -> Standing:
        if worker.departure:
            return "superseded" if worker.departure == "left" else "fenced"
        if not (entry.runs and awaited):
            return "superseded"
        present = entry.placements[-1]
        same = present.attempt == fact.attempt and present.incarnation == fact.incarnation
        return "bound" if same else "superseded"

    def moved(self, decision: Migrate) -> None:
        entry = self.request(decision.trajectory)
        if entry is not None:
            entry.moving = True

    def released(self, fact: RequestReleased, at: Moment) -> None:
        entry = self.request(fact.trajectory)
        if entry is None:
            self._wrong(at, f"{fact.trajectory} is released, which was never dispatched")
            return
        worker = self.workers.get(fact.incarnation)
        present = entry.placements[-1] if entry.placements else None
        if worker is None or worker.departure or present is None:
            return
        group = self.groups[group_of(fact.trajectory)]
        if (present.attempt, present.incarnation) != (
            fact.attempt,
            fact.incarnation,
        ) or group.closed:
            return
        if not entry.moving:
            self._wrong(at, f"{fact.trajectory} is released although nobody asked to move it")
            return
        self._lost(group, entry, fault=False)

    def failed(self, fact: RequestFailed, at: Moment) -> None:
        entry = self.request(fact.trajectory)
        if entry is None:
            self._wrong(at, f"{fact.trajectory} failed, which was never dispatched")
            return
        entry.errors.append(f"attempt {fact.attempt}: {fact.error}: {fact.message}")
        worker = self.workers.get(fact.incarnation)
        present = entry.placements[-1] if entry.placements else None
        if worker is None or worker.departure or present is None:
            return
        group = self.groups[group_of(fact.trajectory)]
        if (present.attempt, present.incarnation) != (
            fact.attempt,
            fact.incarnation,
        ) or group.closed:
            return
        if fact.retryable:
            self._lost(group, entry, fault=True)
        elif not (entry.over or entry.waiting):
            self._fail(group, entry)

    def expire(self, group: GroupEntry) -> None:
        group.expired = True
        self.sample_ended(group)

    def end_samples(self, decision: EndSamples, at: Moment) -> None:
        group = self.groups.get(decision.group)
        for sample in () if group is None else decision.samples:
            entry = group and group.requests.get(trajectory_id(decision.group, sample))
            if entry and not entry.over:
                entry.left, entry.left_ns, entry.waiting = decision.outcome, at.now_ns, False

    def asked(self, decision: ScoreGroup) -> None:
        group = self.groups.get(decision.spec.group)
        if group is not None and group.scoring is not None:
            group.scoring.asked.append(decision)
            group.scoring.open = True

    def scored(self, fact: GroupScored, at: Moment) -> None:
        """Book a score; only the first of the newest attempt counts."""
        group = self.groups.get(fact.group)
        scoring = None if group is None else group.scoring
        asked = scoring and scoring.was_asked(fact.attempt, fact.worker, fact.incarnation)
        if group is None or scoring is None or asked is None:
            what = f"attempt {fact.attempt} of {fact.group} by {fact.worker}"
            self._wrong(at, f"scores {what}, but no decision asked for it")
            return
        named = [one.trajectory for one in asked.trajectories]
        if not fact.error and [one.trajectory for one in fact.samples] != named:
            self._wrong(at, f"scores other trajectories of {fact.group} than it was asked about")
            return
        worker = self.workers.get(fact.incarnation)
        counts = scoring.open and scoring.asked[-1] is asked and group.outcome is None
        if not counts or worker is None or worker.departure:
            return
        if fact.error:
            self._not_scored(group, scoring, fault=True, final=not fact.retryable)
            return
        scoring.open = False
        scoring.answer = fact
        self.sample_ended(group)

    def _not_scored(
        self, group: GroupEntry, scoring: Scoring, *, fault: bool, final: bool = False
    ) -> None:
        scoring.open = False
        scoring.faults += fault
        if final or (fault and self.max_attempts and scoring.faults >= self.max_attempts):
            scoring.failed = True
            self.sample_ended(group)

    def end(
        self,
        name: str,
        outcome: Outcome,
        why: str,
        at: Moment,
        *,
        step: int | None = None,
        part: int = 0,
    ) -> None:
        """Set a group's outcome; violations are a second one and an unknown group."""
        group = self.groups.get(name)
        if group is None:
            self._findings.add("C2", name, f"is {_said(outcome, step)} but was never dispatched")
        elif group.outcome is not None:
            first = f"{_said(group.outcome, group.step)} and nothing after it"
            found = _said(outcome, step)
            self._findings.add("C2", name, "has two outcomes", expected=first, found=found)
        else:
            group.outcome, group.why, group.step, group.ended = outcome, why, step, at
            group.part = part
            self.ended[name] = None
            del self.open[name]

    def _lost(self, group: GroupEntry, entry: RequestEntry, *, fault: bool) -> None:
        if entry.over or entry.waiting:
            return
        entry.waiting = True
        entry.faults += fault
        if self.max_attempts and entry.faults >= self.max_attempts and not group.closed:
            self._fail(group, entry)

    def _fail(self, group: GroupEntry, entry: RequestEntry) -> None:
        entry.failed, entry.waiting = True, False
        self.sample_ended(group)

    def _wrong(self, at: Moment, message: str) -> None:
        self._findings.add("control", f"control:{at.offset}", message)


def _engine(fact: WorkerJoined) -> EngineKey:
    return fact.engine, fact.engine_version, fact.device, fact.dtype


def _said(outcome: Outcome, step: int | None) -> str:
    return outcome if step is None else f"{outcome}({step})"
