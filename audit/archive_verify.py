"""Looks at every byte of an archive; names what is wrong, one line each, and raises nothing for it.

What this cannot see: an archive that was rewritten as a whole, with digests and a chain that fit.
`audit` of the archive can (the rounds have a chain of their own, facts and commits name digests),
and so can anybody who wrote down an earlier head of the chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora_pipe.bus.archive.manifest import (
    CLAIMS,
    MANIFEST,
    SEGMENTS,
    Entry,
    Manifest,
    load_manifest,
    problems_of,
)
from dora_pipe.bus.archive.segment import read_segment
from dora_pipe.bus.claim_check import CLAIM, claimed_bytes
from dora_pipe.bus.port import Record
from dora_pipe.core.errors import InvariantBroken, LogTruncated
from dora_pipe.store.store import file_sha256

PROBLEMS_MAX: Final = 1000
"""Lines of an archive in which nothing is right."""


@dataclass(slots=True, kw_only=True)
class Verified:
    """What was looked at, and what is wrong."""

    run: str = ""
    segments: int = 0
    records: int = 0
    bytes: int = 0
    """Of files."""
    claims: int = 0
    head: str = ""
    cut: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Positions per topic and partition: everything before them is in the archive."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is as it was archived, and strange."""

    def add(self, problem: str) -> None:
        """One more thing that is wrong."""
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(problem)


def verify(directory: Path, *, expected: str = "") -> Verified:
    """Look at the manifest, its chain, every segment and every claimed value.

    `expected` is a head of the chain that somebody wrote down: it must stand in the chain still.
    Raises SchemaError, LogTruncated when the manifest itself cannot be read.
    """
    manifest = load_manifest(directory)
    found = Verified(run=manifest.run, head=manifest.head, cut=dict(manifest.cut))
    for problem in problems_of(manifest):
        found.add(f"{MANIFEST}: {problem}")
    if expected and expected not in {manifest.head, *(one.chain for one in manifest.entries)}:
        found.add(f"{MANIFEST}: its chain never had the value {expected}: the archive is another")
    for entry in manifest.entries:
        _look(directory, entry, found)
    _strangers(directory, manifest, found)
    return found


def raise_if_damaged(found: Verified) -> None:
    """Raise InvariantBroken, naming the first problem, unless there is none."""
    if found.problems:
        more = f" (and {len(found.problems) - 1} more)" if len(found.problems) > 1 else ""
        raise InvariantBroken(f"{found.problems[0]}{more}", hint="restore it from a copy")


def _look(directory: Path, entry: Entry, found: Verified) -> None:
    where = f"{entry.topic}/{entry.partition}"
    if entry.deleted:
        last = entry.start + entry.deleted - 1
        found.notes.append(f"{where}: {entry.start} to {last} were deleted before they were sealed")
    for offset in entry.odd:
        found.notes.append(f"{where}@{offset}: its bytes are not those that its headers name")
    if not entry.records:
        return
    try:
        segment = read_segment(directory / SEGMENTS / entry.file, entry)
    except (InvariantBroken, LogTruncated) as error:
        found.add(error.message)
        return
    found.segments += 1
    found.records += entry.records
    found.bytes += entry.file_bytes
    for record in segment.claiming():
        _look_at_claim(directory, record, entry, found)


def _look_at_claim(directory: Path, record: Record, entry: Entry, found: Verified) -> None:
    size_bytes = claimed_bytes(record)
    if not size_bytes or record.offset in entry.odd:
        return
    digest = dict(record.headers)[CLAIM].decode()
    path = directory / CLAIMS / digest
    where = f"{record.topic}/{record.partition}@{record.offset}"
    if not path.is_file():
        found.add(f"{where}: the value that it claims is gone: {CLAIMS}/{digest}")
    elif file_sha256(path) != digest:
        found.add(f"{where}: the value that it claims was changed: {CLAIMS}/{digest}")
    else:
        found.claims += 1


def _strangers(directory: Path, manifest: Manifest, found: Verified) -> None:
    named = {entry.file for entry in manifest.entries}
    folder = directory / SEGMENTS
    others = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in others:
        if name not in named:
            found.notes.append(f"{SEGMENTS}/{name} is not in the manifest: a pass was interrupted")
