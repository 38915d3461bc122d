"""Checks that a record is the one that `trajectory logged` references: position, id and digest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from dora_pipe.bus.blobs import lost_blob
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.pure.records import Record
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
