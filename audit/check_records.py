"""Check trajectories records against control and decisions, after their group has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple

from dora_pipe.audit.evidence import Content, Evidence, Place
from dora_pipe.audit.findings import Check
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.reading import Buried
from dora_pipe.ledger.history import GroupHistory, RecordLogged
from dora_pipe.schemas.control import TrajectoryLogged
from dora_pipe.schemas.identity import group_of, trajectory_seed
from dora_pipe.schemas.trajectory import Headers, Segment, mixing_error

_REPEATED: Final = ("attempt", "incarnation", "worker", "version", "digest", "reward")
"""Header fields that `trajectory logged` repeats."""

_HEADERS: Final = ("trajectory", "sampled tokens", *_REPEATED)
_of_fact = attrgetter("trajectory", "tokens", *_REPEATED)
_of_headers = attrgetter("trajectory", "sampled", *_REPEATED)


class _Asked(NamedTuple):
    checks: Mapping[str, Check]
    counts: Mapping[Check, int]


def _asked(**checks: Check) -> _Asked:
    return _Asked(checks, Counter(checks.values()))


_OF_HEADERS: Final = _asked(group="records", partition="records", deadline="C3", version="C1")
_SPEC: Final = ("source", "task", "dataset_digest", "index", "data_epoch")
_RECORDS: Final[dict[str, Check]] = dict.fromkeys(("group_size", *_SPEC, "seed"), "records")
_OF_VALUE: Final = _asked(**_RECORDS)
_of_spec = attrgetter("size", *_SPEC)
_of_content = attrgetter(*_OF_VALUE.checks)


@dataclass(slots=True, kw_only=True)
class Seen:
    """Results of the trajectories topic."""

    records: int = 0
    bytes: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    """By status; `pending` has no event."""
    other_bytes: dict[Place, str] = field(default_factory=dict)
    """Actual sha256 of records that differ from the log."""
    mixed: Counter[int] = field(default_factory=Counter)
    one_version: int = 0
    """Records with one version and its published digest."""
    mixture: tuple[int, int, int] | None = None
    """Mixture sizes of the first record with experts."""


class RecordCheck:
    """Check of evidence. An unreadable record is a violation unless it is a dead letter of an
    untrained group."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._findings = ledger.findings
        self.buried: Collection[Buried] = ()
        self.seen = Seen()

    def judge(self, evidence: Evidence, logged: RecordLogged | None) -> None:
        self._findings.looked["records"] += 1
        self.seen.records += 1
        self.seen.bytes += evidence.bytes
        if evidence.headers is None:
            self._unreadable(evidence, logged, f"headers cannot be read: {evidence.header_error}")
            return
        if evidence.headers.run != self._ledger.run:
            message = f"is of another run, in the log at {evidence.where}"
            self._wrong(
                evidence.headers.trajectory, message, self._ledger.run, evidence.headers.run
            )
            return
        if evidence.other_key:
            message = f"has another key than its group, at {evidence.where}"
            self._wrong(
                evidence.headers.trajectory, message, evidence.headers.group, evidence.other_key
            )
        if logged is None:
            self._not_logged(evidence, evidence.headers)
            return
        self.seen.statuses[logged.status] += 1
        self._logged(evidence, evidence.headers, logged)

    def missing(self, logged: RecordLogged) -> None:
        partition, offset = logged.place
        where = f"trajectories:{partition}:{offset}"
        message = f"was logged, but {where} has no record"
        self._wrong(logged.fact.trajectory, message)

    def cut(self, partition: int, end: int, missing: Iterable[RecordLogged]) -> None:
        offsets = [logged.fact.offset for logged in missing]
        message = f"was cut before {len(offsets)} logged records"
        expected = f"end > {max(offsets)}"
        self._wrong(f"trajectories:{partition}", message, expected, end)

    def _unreadable(self, evidence: Evidence, logged: RecordLogged | None, message: str) -> None:
        who = evidence.where if logged is None else f"{logged.fact.trajectory} at {evidence.where}"
        group = None
        if logged is not None:
            group = self._ledger.accounts.groups[group_of(logged.fact.trajectory)]
        trained = group is not None and group.outcome == "trained"
        if (evidence.topic, evidence.partition, evidence.offset) in self.buried and not trained:
            self._findings.notes.append(f"{who} {message}; it is among the dead letters")
        else:
            self._wrong(who, message)

    def _wrong(
        self, subject: str, message: str, expected: object = "", actual: object = ""
    ) -> None:
        self._findings.add("records", subject, message, expected=expected, actual=actual)

    def _not_logged(self, evidence: Evidence, headers: Headers) -> None:
        entry = self._ledger.accounts.request(headers.trajectory)
        worker = self._ledger.accounts.workers.get(headers.incarnation)
        if entry is None:
            self._wrong(
                headers.trajectory, f"has a record at {evidence.where}, but was never dispatched"
            )
            return
        departure = "" if worker is None else worker.departure
        if departure == "fenced":
            status = "fenced"
        else:
            superseded = entry.bound is not None or departure == "left"
            status = "superseded" if superseded else "pending"
        self.seen.statuses[status] += 1
        if evidence.lost:
            self._unreadable(evidence, None, f"cannot be read: {evidence.lost}")
        elif evidence.sha256 != headers.sha256:
            self._wrong(headers.trajectory, f"its bytes at {evidence.where} were changed")

    def _logged(self, evidence: Evidence, headers: Headers, logged: RecordLogged) -> None:
        fact, before = logged.fact, self._findings.total
        who = fact.trajectory
        if evidence.lost:
            self._unreadable(evidence, logged, f"cannot be read: {evidence.lost}")
            return
        self._bytes(evidence, headers, fact)
        self._headers(headers, fact)
        group = self._ledger.accounts.groups[group_of(who)]
        self._spec(headers, group, evidence)
        if evidence.value_error:
            self._unreadable(evidence, logged, f"cannot be read: {evidence.value_error}")
            return
        pure = True
        if evidence.content is not None:
            for name in evidence.disagree:
                message = f"its header and its value disagree about {name}"
                self._findings.add(_check_of(name), who, message)
            versions = {run.version for run in evidence.content.sampled}
            self._value(evidence.content, versions, logged, group)
            pure = versions <= {evidence.content.version}
        self.seen.one_version += pure and self._findings.total == before

    def _bytes(self, evidence: Evidence, headers: Headers, fact: TrajectoryLogged) -> None:
        if evidence.sha256 != fact.sha256:
            self.seen.other_bytes[evidence.place] = evidence.sha256
            message = f"its bytes at {evidence.where} are not those that were logged (sha256)"
            self._wrong(fact.trajectory, message, fact.sha256, evidence.sha256)
        if evidence.sha256 != headers.sha256:
            message = f"its bytes at {evidence.where} are not those its headers name (sha256)"
            self._wrong(fact.trajectory, message, headers.sha256, evidence.sha256)
        self._same("records", fact.trajectory, "bytes", fact.bytes, evidence.bytes)

    def _headers(self, headers: Headers, fact: TrajectoryLogged) -> None:
        expected, actual = _of_fact(fact), _of_headers(headers)
        if expected == actual:
            self._findings.looked["records"] += len(expected) - 2
            self._findings.looked["C1"] += 2
            return
        for name, value, other in zip(_HEADERS, expected, actual, strict=True):
            self._same(_check_of(name), fact.trajectory, name, value, other)

    def _spec(self, headers: Headers, group: GroupHistory, evidence: Evidence) -> None:
        spec, who = group.spec, headers.trajectory
        stamped = (spec.group, spec.partition, spec.deadline, spec.version)
        actual = (headers.group, evidence.partition, headers.deadline, headers.version)
        self._dispatched(who, _OF_HEADERS, stamped, actual)
        published = self._ledger.versions.get(headers.version)
        if published is None:
            message = f"is of version {headers.version}, which was never published"
            self._findings.add("C1", who, message)
            return
        self._findings.looked["C1"] += 1
        if headers.digest != published.digest:
            message = f"was sampled from other weights than version {headers.version}"
            self._findings.add("C1", who, message, expected=published.digest, actual=headers.digest)

    def _value(
        self, content: Content, versions: set[int], logged: RecordLogged, group: GroupHistory
    ) -> None:
        spec, who = group.spec, logged.fact.trajectory
        expected = (*_of_spec(spec), trajectory_seed(spec.seed, content.sample))
        self._dispatched(who, _OF_VALUE, expected, _of_content(content))
        for name in ("finish", "answer", "error", "contexts", "calls"):
            self._same("records", who, name, getattr(logged.fact, name), getattr(content, name))
        self._findings.looked["records"] += content.calls
        if content.fault:
            self._wrong(who, content.fault)
        self._same("records", who, "reward parts", logged.fact.parts, content.parts)
        self._mixture(content, group, who)
        self._versions(content, versions, logged, group)

    def _mixture(self, content: Content, group: GroupHistory, who: str) -> None:
        config = self._ledger.config
        asked = config is not None and config.sampling.return_routed_experts
        training = group.spec.purpose == "train"
        required, mixture = asked and training and bool(content.sampled), content.mixture
        if not required and mixture is None:
            return
        self._findings.looked["records"] += 1
        if required != (mixture is not None):
            message = (
                "has no routed experts"
                if required
                else "has routed experts that the run does not record"
            )
            self._wrong(who, message, expected=required, actual=not required)
        self.seen.mixture = self.seen.mixture or mixture
        if mixture is not None and mixture != self.seen.mixture:
            self._wrong(who, "is of a mixture of other sizes", self.seen.mixture, mixture)

    def _versions(
        self, content: Content, versions: set[int], logged: RecordLogged, group: GroupHistory
    ) -> None:
        who = logged.fact.trajectory
        self.seen.mixed[len(versions)] += 1
        if self._ledger.partial_rollout and group.spec.purpose == "train":
            self._findings.looked["C1"] += len(content.sampled)
            wrong = wrong_mixture(content, group, logged, self._ledger)
            for message, expected, actual in wrong:
                self._findings.add("C1", who, message, expected=expected, actual=actual)
            return
        strange = versions - {content.version}
        if strange:
            other_versions = ", ".join(str(version) for version in sorted(strange))
            message = "its tokens come from more than one version"
            self._findings.add(
                "C1", who, message, expected=content.version, actual=f"also {other_versions}"
            )

    def _same(self, check: Check, who: str, name: str, expected: object, actual: object) -> None:
        self._findings.looked[check] += 1
        if expected == actual:
            return
        message = f"{name} in the record differs from `trajectory logged`"
        self._findings.add(check, who, message, expected=expected, actual=actual)

    def _dispatched(
        self, who: str, asked: _Asked, expected: tuple[object, ...], actual: tuple[object, ...]
    ) -> None:
        for check, count in asked.counts.items():
            self._findings.looked[check] += count
        if expected == actual:
            return
        for (name, check), value, other in zip(asked.checks.items(), expected, actual, strict=True):
            if value != other:
                message = f"{name} in the record is not what was dispatched"
                self._findings.add(check, who, message, expected=value, actual=other)


def _check_of(header: str) -> Check:
    return "C1" if header in ("version", "digest") else "records"


Wrong = tuple[str, object, object]


def wrong_mixture(
    content: Content, group: GroupHistory, logged: RecordLogged, ledger: Ledger
) -> Iterator[Wrong]:
    """Yield violations of a trajectory with several versions."""
    newest = ledger.version if group.step is None else group.step
    if why := mixing_error(content, newest):
        yield f"its versions are not in order: {why}", "", ""
    for sampler in content.weights:
        published = ledger.versions.get(sampler.version)
        digest = "nothing" if published is None else published.digest
        if sampler.digest != digest:
            yield f"names other weights than version {sampler.version} has", digest, sampler.digest
    named = {sampler.version for sampler in content.weights} | {content.version}
    for segment in content.sampled:
        if segment.version not in named:
            yield f"names no weights for version {segment.version}", "", ""
        if why := _not_served(segment, logged, ledger):
            yield why, "", ""


def _not_served(segment: Segment, logged: RecordLogged, ledger: Ledger) -> str:
    worker = ledger.accounts.workers.get(segment.incarnation)
    of = f"{segment.worker} of incarnation {segment.incarnation}"
    who = f"tokens {segment.start} to {segment.end} name {of}"
    if worker is None or worker.name != segment.worker:
        return f"{who}, which never joined"
    ready = worker.first_ready.get(segment.version)
    if ready is None or ready > logged.offset:
        return f"{who}, which did not serve version {segment.version} then"
    return ""
