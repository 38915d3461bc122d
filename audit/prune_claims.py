"""Decides which values that lie beside the log nobody claims.

A value is written before the record that claims it is appended (`bus.claim_check`). A worker that
dies in between, or whose append fails for good, leaves a value that no record will ever name. It
may go when it is so old that nobody can be about to name it: every record of the log and of its
archive was read after the file was listed, and a file that was written again meanwhile is young.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.audit.prune import PruneCandidate
from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.archive.manifest import SEGMENTS, load_manifest
from dora_pipe.bus.archive.segment import read_segment
from dora_pipe.bus.claim_check import ClaimBus, claim_of, may_be_claimed
from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import LogTruncated
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.files import Listed
from dora_pipe.store.store import PolicyStore

AGE_MIN_S: Final = 3600.0
"""A role gives an append up after 120 s; the rest is for clocks that differ and frozen machines."""

_OURS: Final = re.compile(r"[0-9a-f]{64}|\..*")
"""A digest, or an unfinished file. Nothing else is touched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimPlan:
    """Which values would be deleted."""

    candidates: tuple[PruneCandidate, ...] = ()
    files: int = 0
    """Of all claimed values in the store."""
    bytes: int = 0
    freed_bytes: int = 0
    note: str = ""
    """Why none is deleted although there are old ones; empty if that is not so."""


def plan_claims(
    bus: Bus,
    topics: Topics,
    store: PolicyStore,
    *,
    clock: Clock,
    archive: Path | None = None,
    age_min_s: float = AGE_MIN_S,
) -> ClaimPlan:
    """Look; nothing is changed. The log is only read if there is a value that is old enough.

    Raises ResourceError, BusError, and InvariantBroken or LogTruncated for a damaged archive.
    """
    listed = store.claims()
    latest_ns = clock.wall_ns() - int(age_min_s * 1e9)
    old = [one for one in listed if _is_ours(one) and 0 < one.modified_ns <= latest_ns]
    candidates: tuple[PruneCandidate, ...] = ()
    note = ""
    if old:
        try:
            named = {*_named_in_log(bus, topics), *_named_in_archive(archive)}
            candidates = tuple(
                PruneCandidate(file=one, why="unclaimed") for one in old if _last(one) not in named
            )
        except LogTruncated as error:
            if archive is not None:
                raise
            note = f"{len(old)} claimed values are left as they are: {error.message}"
    return ClaimPlan(
        candidates=candidates,
        files=len(listed),
        bytes=sum(one.bytes for one in listed),
        freed_bytes=sum(one.file.bytes for one in candidates),
        note=note,
    )


def prune_claims(store: PolicyStore, plan: ClaimPlan) -> int:
    """Delete what a plan names and nobody has written again since; how many files there were."""
    if not plan.candidates:
        return 0
    times = {one.name: one.modified_ns for one in store.claims()}
    same = [one for one in plan.candidates if times.get(one.file.name) == one.file.modified_ns]
    return sum(store.remove(one.file) for one in same)


def _named_in_log(bus: Bus, topics: Topics) -> Iterator[str]:
    """From the first record on: LogTruncated where retention has deleted it and no archive is."""
    raw = bus.inner if isinstance(bus, ClaimBus) else bus  # Names are wanted, not the values.
    for topic in filter(may_be_claimed, topics.all()):
        for tp, end in ends_of(raw, topic).items():
            yield from _named(_records(raw, tp, end))


def _records(bus: Bus, tp: TopicPartition, end: int) -> Iterator[Record]:
    return records_of(bus, {tp: end}) if end else iter(())


def _named_in_archive(archive: Path | None) -> Iterator[str]:
    """What lies behind the cut of an interrupted pass counts, too."""
    if archive is None:
        return
    for entry in load_manifest(archive).entries:
        if entry.records and may_be_claimed(entry.topic):
            yield from _named(read_segment(archive / SEGMENTS / entry.file, entry).claiming())


def _named(records: Iterator[Record]) -> Iterator[str]:
    return filter(None, map(claim_of, records))


def _is_ours(one: Listed) -> bool:
    return _OURS.fullmatch(_last(one)) is not None


def _last(one: Listed) -> str:
    return one.name.rpartition("/")[2]
