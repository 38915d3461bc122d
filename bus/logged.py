"""Reader of logged records, and checks that each is the one that `trajectory logged` references:
position, id and digest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from dora_pipe.bus.base import records_until
from dora_pipe.bus.blobs import lost_blob
from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import digest_as

LINES_MAX: Final = 20


class Named(Protocol):
    """Reference to a record: `TrajectoryLogged` or an equivalent."""

    @property
    def trajectory(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def sha256(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFingerprint:
    """Facts about a record that allow checking it without its value."""

    sha256: str
    """Digest of the value."""
    headers_of: str
    """Trajectory id in the headers."""
    value_of: str = ""
    """Trajectory id in the value; empty if not decoded."""
    lost: str = ""
    """Reason why the value is missing."""


def record_digest(record: Record) -> str:
    """Return the value's digest in the form of its headers, sha256 by default."""
    named = dict(record.headers).get("sha256", b"").decode(errors="replace")
    return named if record.checked == named != "" else digest_as(named, record.value)


def fingerprint_of(record: Record, *, value_of: str = "") -> RecordFingerprint:
    headers_of = dict(record.headers).get("trajectory", b"").decode(errors="replace")
    if lost := lost_blob(record):
        return RecordFingerprint(sha256="", headers_of=headers_of, lost=lost)
    return RecordFingerprint(sha256=record_digest(record), headers_of=headers_of, value_of=value_of)


def fault_of(record: Record | RecordFingerprint | None, named: Named) -> str:
    """Return why a record differs from its reference, empty if not; does not decode it."""
    where = f"at trajectories:{named.partition}:{named.offset}"
    if record is None:
        return f"its record is missing {where}"
    fingerprint = record if isinstance(record, RecordFingerprint) else fingerprint_of(record)
    if fingerprint.lost:
        return f"its record {where} cannot be read: {fingerprint.lost}"
    if fingerprint.sha256 != named.sha256:
        return f"the record {where} is not the one that was logged: sha256 {fingerprint.sha256}"
    if fingerprint.headers_of != named.trajectory:
        return f"the record {where} has the headers of {fingerprint.headers_of!r}"
    if fingerprint.value_of not in ("", named.trajectory):
        return f"the record {where} is {fingerprint.value_of}"
    return ""


def logged_trajectory(record: Record | None, named: Named) -> Trajectory:
    """Return the trajectory. Raises InvariantBroken, SchemaError."""
    if why := fault_of(record, named):
        raise InvariantBroken(f"{named.trajectory}: {why}")
    assert record is not None
    trajectory = decode_trajectory(record.value)
    if trajectory.trajectory != named.trajectory:
        where = f"trajectories:{named.partition}:{named.offset}"
        raise InvariantBroken(
            f"{named.trajectory}: the record at {where} is {trajectory.trajectory}"
        )
    return trajectory


@dataclass(slots=True)
class Damage:
    """Trajectories whose records differ from their references."""

    count: int = 0
    lines: list[str] = field(default_factory=list)
    """The first `LINES_MAX` trajectories with their reasons."""

    def is_sound(self, record: Record | RecordFingerprint | None, named: Named) -> bool:
        """Return whether the record matches; record the damage if not."""
        why = fault_of(record, named)
        if why:
            self.count += 1
            if len(self.lines) < LINES_MAX:
                self.lines.append(f"{named.trajectory}: {why}")
        return not why

    def look_for_the_rest(self, remaining: Mapping[tuple[int, int], Named]) -> None:
        """Record unmatched references as missing."""
        for named in remaining.values():
            self.is_sound(None, named)

    def raise_if_any(self, consequence: str) -> None:
        """Raises InvariantBroken if there is damage."""
        if self.count:
            who = f"{self.count} trajectories that were logged are"
            who = who if self.count > 1 else "1 trajectory that was logged is"
            raise InvariantBroken(
                f"{who} damaged{consequence}",
                hint="the other records are intact; `dora-pipe audit` checks the whole log",
            )


AnyNamed = TypeVar("AnyNamed", bound=Named)


class RecordPlace(NamedTuple):
    partition: int
    offset: int


class PlaceReader:
    """Seeking readers by partition; offsets within `gap` are read together, and `attempt` makes the
    calls."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        *,
        gap: int = 64,
        attempt: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> None:
        self._bus = bus
        self._topic = topic
        self._gap = gap
        self._attempt = attempt
        self._readers: dict[TopicPartition, Reader] = {}

    def read(self, places: Iterable[RecordPlace]) -> Iterator[Record]:
        """Yield the records at these existing places, and any between. Raises BusError if they do
        not arrive.
        """
        for stretch in stretches(places, self._gap):
            source = TopicPartition(self._topic, stretch[0].partition)
            first, last = stretch[0].offset, stretch[-1].offset
            if source not in self._readers:
                self._readers[source] = self._attempt(partial(self._bus.reader, {source: first}))
            reader = self._readers[source]
            reader.seek(source, first)
            yield from records_until(
                reader, {source: last + 1}, records_max=last - first + 1, attempt=self._attempt
            )

    def named(self, named: Iterable[AnyNamed], damage: Damage) -> Iterator[tuple[Record, AnyNamed]]:
        """Yield the records that match their references, in order; record others in `damage`."""
        by_place = {(each.partition, each.offset): each for each in named}
        partitions = {partition for partition, _ in by_place}
        ends = {number: self._bus.end(TopicPartition(self._topic, number)) for number in partitions}
        there = [RecordPlace(*key) for key in by_place if key[1] < ends[key[0]]]
        for record in self.read(there):
            logged = by_place.pop((record.partition, record.offset), None)
            if logged is not None and damage.is_sound(record, logged):
                yield record, logged
        damage.look_for_the_rest(by_place)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def stretches(places: Iterable[RecordPlace], gap: int) -> list[list[RecordPlace]]:
    """Group places of one partition within `gap` of each other, sorted."""
    grouped: list[list[RecordPlace]] = []
    for position in sorted(places):
        last = grouped[-1][-1] if grouped else None
        near = last is not None and last.partition == position.partition
        if last is not None and near and position.offset - last.offset <= gap:
            grouped[-1].append(position)
        else:
            grouped.append([position])
    return grouped
