"""Holds every record of the trajectories topic against what control and decisions say of it.

One pass, one record in memory at a time. What stays of a record is a count, unless its bytes are
not those that were logged: then its real sha256 is kept, so that batches can be digested from the
bytes that are there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

from dora_pipe.bus.port import Bus, Record
from dora_pipe.errors import SchemaError
from dora_pipe.history.check_mixed import wrong_mixture
from dora_pipe.history.entries import GroupEntry, Logged
from dora_pipe.history.findings import Check
from dora_pipe.history.ledger import Ledger
from dora_pipe.history.reading import Buried, Horizon, horizon_of, records_of
from dora_pipe.schemas.control import TrajectoryLogged
from dora_pipe.schemas.identity import group_of, trajectory_seed
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Headers, Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory, matches, parse_headers
from dora_pipe.schemas.wire import sha256_hex

Place = tuple[int, int]
"""Partition and offset."""

_HEADER_CHECKS: Final = ("attempt", "epoch", "worker", "version", "digest", "reward")
"""Header fields that `trajectory logged` repeats under the same name."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """What the pass over the trajectories topic leaves behind."""

    records: int = 0
    bytes: int = 0
    standings: Counter[str] = field(default_factory=Counter)
    """Records by standing; `pending` are those that nobody has logged."""
    places: set[Place] = field(default_factory=set)
    """Where logged records were found."""
    other_bytes: dict[Place, str] = field(default_factory=dict)
    """Real sha256 of records whose bytes are not those that were logged."""
    mixed: Counter[int] = field(default_factory=Counter)
    """Logged records by the number of versions that sampled them."""
    one_version: int = 0
    """Records all of whose evidence names one version and its published digest."""


def check_records(
    bus: Bus,
    topics: Topics,
    ledger: Ledger,
    *,
    horizon: Horizon | None = None,
    buried: Collection[Buried] = (),
) -> Seen:
    """Read every trajectory once; then name the logged ones that are not there.

    A record that cannot be read is a violation, unless it is among the dead letters and its group
    was not trained: then the run has dealt with it. `horizon` is the one that the ledger was made
    under; a record behind it that nobody has named yet is none of this look's business.
    """
    ends = horizon or horizon_of(bus, topics)
    look = _Look(ledger, buried)
    for record in records_of(bus, ends.trajectories):
        named = (record.partition, record.offset) in ledger.accounts.logged
        if named or record.offset < ends.trajectories_before[record.at]:
            look.record(record)
    look.missing()
    return look.seen


class _Look:
    def __init__(self, ledger: Ledger, buried: Collection[Buried]) -> None:
        self._ledger = ledger
        self._buried = buried
        self._findings = ledger.findings
        self.seen = Seen()

    def record(self, record: Record) -> None:
        """Check one record; it is told by its place until its headers are known."""
        place = (record.partition, record.offset)
        self._findings.looked["records"] += 1
        self.seen.records += 1
        self.seen.bytes += len(record.value)
        logged = self._ledger.accounts.logged.get(place)
        if logged is not None:
            self.seen.places.add(place)
        try:
            headers = parse_headers(record.headers)
        except SchemaError as error:
            self._unreadable(record, logged, f"headers cannot be read: {error.message}")
            return
        if headers.run != self._ledger.run:
            message = f"is of another run, in the log at {_where(record)}"
            self._wrong(headers.trajectory, message, self._ledger.run, headers.run)
            return
        if logged is None:
            self._not_logged(record, headers)
            return
        self.seen.standings[logged.standing] += 1
        self._logged(record, headers, logged)

    def missing(self) -> None:
        """Records that control names and the topic does not have: something was lost."""
        for place, logged in self._ledger.accounts.logged.items():
            if place not in self.seen.places:
                message = f"was logged, but its record is not there at trajectories:{_at(place)}"
                self._wrong(logged.fact.trajectory, message)

    def _unreadable(self, record: Record, logged: Logged | None, message: str) -> None:
        who = _where(record) if logged is None else f"{logged.fact.trajectory} at {_where(record)}"
        group = None
        if logged is not None:
            group = self._ledger.accounts.groups[group_of(logged.fact.trajectory)]
        trained = group is not None and group.fate == "trained"
        if (record.topic, record.partition, record.offset) in self._buried and not trained:
            self._findings.notes.append(f"{who} {message}; it is among the dead letters")
        else:
            self._wrong(who, message)

    def _wrong(self, subject: str, message: str, expected: object = "", found: object = "") -> None:
        self._findings.add("records", subject, message, expected=expected, found=found)

    def _not_logged(self, record: Record, headers: Headers) -> None:
        """A record that control does not name: its worker was lost, or has yet to say so."""
        entry = self._ledger.accounts.request(headers.trajectory)
        worker = self._ledger.accounts.workers.get(headers.epoch)
        if entry is None:
            where = _where(record)
            self._wrong(headers.trajectory, f"lies at {where} but was never dispatched")
            return
        departure = "" if worker is None else worker.departure
        if departure == "fenced":
            standing = "fenced"
        else:
            superseded = entry.bound is not None or departure == "left"
            standing = "superseded" if superseded else "pending"
        self.seen.standings[standing] += 1
        if sha256_hex(record.value) != headers.sha256:
            self._wrong(headers.trajectory, f"its bytes at {_where(record)} were changed")

    def _logged(self, record: Record, headers: Headers, logged: Logged) -> None:
        fact, before = logged.fact, self._findings.total
        who = fact.trajectory
        self._bytes(record, headers, fact)
        self._same("records", who, "trajectory", fact.trajectory, headers.trajectory)
        for name in _HEADER_CHECKS:
            self._same(_check_of(name), who, name, getattr(fact, name), getattr(headers, name))
        self._same("records", who, "sampled tokens", fact.tokens, headers.sampled)
        group = self._ledger.accounts.groups[group_of(who)]
        self._spec(headers, group, record)
        try:
            trajectory = decode_trajectory(record.value)
        except SchemaError as error:
            self._unreadable(record, logged, f"cannot be read: {error.message}")
            return
        self._value(trajectory, headers, logged, group)
        one = set(trajectory.versions) <= {trajectory.version}
        self.seen.one_version += one and self._findings.total == before

    def _bytes(self, record: Record, headers: Headers, fact: TrajectoryLogged) -> None:
        sha256 = sha256_hex(record.value)
        where = f"its bytes at {_where(record)}"
        if sha256 != fact.sha256:
            self.seen.other_bytes[record.partition, record.offset] = sha256
            message = f"{where} are not those that were logged (sha256)"
            self._wrong(fact.trajectory, message, fact.sha256, sha256)
        if sha256 != headers.sha256:
            message = f"{where} are not those its headers name (sha256)"
            self._wrong(fact.trajectory, message, headers.sha256, sha256)
        self._same("records", fact.trajectory, "bytes", fact.bytes, len(record.value))

    def _spec(self, headers: Headers, group: GroupEntry, record: Record) -> None:
        """What the dispatch stamped stands in the headers, and on a published version."""
        spec, who = group.spec, headers.trajectory
        self._dispatched("records", who, "group", spec.group, headers.group)
        self._dispatched("records", who, "partition", spec.partition, record.partition)
        self._dispatched("C3", who, "deadline", spec.deadline, headers.deadline)
        self._dispatched("C1", who, "version", spec.version, headers.version)
        published = self._ledger.versions.get(headers.version)
        if published is None:
            found = f"version {headers.version}"
            self._findings.add("C1", who, f"is of {found}, which nobody published")
        else:
            message = f"was sampled from other weights than version {headers.version}"
            self._findings.same("C1", who, message, expected=published.digest, found=headers.digest)

    def _value(
        self, trajectory: Trajectory, headers: Headers, logged: Logged, group: GroupEntry
    ) -> None:
        fact, meta, spec = logged.fact, trajectory.meta, group.spec
        who = fact.trajectory
        for name in matches(headers, trajectory):
            check = _check_of(name)
            self._findings.add(check, who, f"its header and its value disagree about {name}")
        wanted: dict[str, Any] = {
            "group_size": spec.size,
            "purpose": spec.purpose,
            "dataset_digest": spec.dataset_digest,
            "index": spec.index,
            "data_epoch": spec.data_epoch,
            "seed": trajectory_seed(spec.seed, meta.sibling),
        }
        for name, expected in wanted.items():
            self._dispatched("records", who, name, expected, getattr(meta, name))
        self._same("records", who, "finish", fact.finish, meta.finish)
        self._versions(trajectory, logged, group)

    def _versions(self, trajectory: Trajectory, logged: Logged, group: GroupEntry) -> None:
        who, versions = logged.fact.trajectory, set(trajectory.versions)
        self.seen.mixed[len(versions)] += 1
        if self._ledger.interruptible and group.spec.purpose == "train":
            self._findings.looked["C1"] += len(trajectory.segments)
            wrong = wrong_mixture(trajectory, group, logged, self._ledger)
            for message, expected, found in wrong:
                self._findings.add("C1", who, message, expected=expected, found=found)
            return
        strange = versions - {trajectory.version}
        if strange:
            others = ", ".join(str(version) for version in sorted(strange))
            message = "its tokens come from more than one version"
            self._findings.add(
                "C1", who, message, expected=trajectory.version, found=f"also {others}"
            )

    def _same(self, check: Check, who: str, name: str, expected: object, found: object) -> None:
        message = f"{name} in the record is not what `trajectory logged` says"
        self._findings.same(check, who, message, expected=expected, found=found)

    def _dispatched(
        self, check: Check, who: str, name: str, expected: object, found: object
    ) -> None:
        message = f"{name} in the record is not what was dispatched"
        self._findings.same(check, who, message, expected=expected, found=found)


def _check_of(header: str) -> Check:
    return "C1" if header in ("version", "digest") else "records"


def _at(place: Place) -> str:
    return f"{place[0]}:{place[1]}"


def _where(record: Record) -> str:
    return f"trajectories:{record.partition}:{record.offset}"
