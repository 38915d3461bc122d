"""What an archive says of itself: its manifest, the chain of its entries, how files appear in it.

    <archive>/manifest.json
    <archive>/segments/<topic>-<partition>-<position>.arrow.zst

An entry speaks of one segment: the positions of one partition from `start` to `end`, without a
hole to the entry before it. `chain` is the sha256 of the previous entry's chain and of this entry,
so an entry that is changed, moved or taken out breaks every chain behind it. What readers see ends
at `cut`: positions that belong together. Segments behind it are of a pass that was not finished.

Files get their names at once: written under a temporary name, synced, renamed, the folder synced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.bus.checks import PARTITIONS_MAX, POSITION_MAX
from dora_pipe.bus.port import TopicPartition
from dora_pipe.core.durable import NO_ROOM, sync
from dora_pipe.core.errors import BusFull, InvariantBroken, LogTruncated, ResourceError, SchemaError
from dora_pipe.schemas.wire import schema_error

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
SEGMENTS: Final = "segments"
CLAIMS: Final = "claims"
"""Folder of the values that were too large for the log (see `bus.claim_check`)."""

DAMAGED: Final = "restore it from a copy; `dora-pipe archive --verify DIR` names all that is wrong"
"""What can be done about an archive that is not what it says."""

AGAIN: Final = "free some space and archive again: it goes on where it was"

TEMPORARY: Final = ".tmp-"
"""How the name of an unfinished file begins."""

MANIFEST_BYTES_MAX: Final = 512 * 1024 * 1024
"""More than a million entries; a larger file is no manifest."""

SEGMENT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Of a segment's Arrow stream; what a reader is prepared to hold."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sealed segment. Without records it has no file: offsets that hold nothing."""

    topic: str
    partition: int
    start: int
    """The position that it goes on from; also in the name of its file."""
    end: int
    """The position after it; gaps behind its last record belong to it."""
    records: int
    bytes: int
    """Of the Arrow stream inside the file."""
    file: str
    file_bytes: int
    sha256: str
    """Hex, of the file."""
    deleted: int = 0
    """So many positions from `start` on had been deleted from the log before it was archived;
    only in topics that prove nothing."""
    odd: tuple[int, ...] = ()
    """Offsets of records whose bytes are not those that their `sha256` header names; they lie in
    the log like that."""
    chain: str = ""
    """Hex: `chain_of` the previous entry's chain and this entry."""

    @property
    def at(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def name(self) -> str:
        """How people are told of it."""
        return self.file or f"{self.topic}/{self.partition} from {self.start} (no records)"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An archive's table of contents; its order is the order of the chain."""

    format: int
    run: str
    topics: dict[str, int]
    """Partitions of each topic."""
    cut: dict[str, tuple[int, ...]]
    """Position per topic and partition at which the last finished pass ended."""
    entries: tuple[Entry, ...] = ()

    @property
    def head(self) -> str:
        """The chain's last value: it stands for everything in the archive."""
        return self.entries[-1].chain if self.entries else genesis(self.run, self.topics)


_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODER = msgspec.json.Decoder(Manifest)


def genesis(run: str, topics: Mapping[str, int]) -> str:
    """What the first entry's chain follows."""
    return _sha256(_ENCODER.encode({"format": FORMAT, "run": run, "topics": dict(topics)}))


def chain_of(previous: str, entry: Entry) -> str:
    """sha256 over the previous chain (hex) and this entry as JSON: its own chain empty, keys
    sorted, no spaces."""
    return _sha256(previous.encode() + _ENCODER.encode(msgspec.structs.replace(entry, chain="")))


def file_name(tp: TopicPartition, start: int) -> str:
    """The name of the segment that goes on from this position."""
    return f"{tp.topic}-{tp.partition}-{start:012d}.arrow.zst"


def read_manifest(directory: Path) -> Manifest:
    """The manifest, with its chain checked.

    Raises LogTruncated where there is none, SchemaError for one that cannot be read,
    InvariantBroken, naming the entry, for one that was changed.
    """
    found = load_manifest(directory)
    for problem in problems_of(found):
        raise InvariantBroken(f"{directory / MANIFEST}: {problem}", hint=DAMAGED)
    return found


def check_cut(directory: Path, manifest: Manifest) -> None:
    """Raises LogTruncated for an archive whose first pass never ended: it shows nothing yet."""
    if not any(map(any, manifest.cut.values())):
        raise LogTruncated(
            f"the archive {directory} cannot be read yet: its first pass has not ended",
            hint="if it was interrupted: `dora-pipe archive RUN --to DIR` goes on where it was",
        )


def load_manifest(directory: Path) -> Manifest:
    """The manifest as it says it is; see `problems_of`. Raises LogTruncated, SchemaError."""
    path = directory / MANIFEST
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MANIFEST_BYTES_MAX:
            raise SchemaError(f"{path} of {size_bytes} bytes is no manifest", hint=DAMAGED)
        data = path.read_bytes()
    except FileNotFoundError:
        raise LogTruncated(
            f"{directory} is no archive: there is no {MANIFEST} in it",
            hint="name the folder that `dora-pipe archive RUN --to DIR` made; "
            "a lost file comes back from a copy",
        ) from None
    except OSError as error:
        raise LogTruncated(
            f"{path} cannot be read: {error.strerror}", hint="an archive cannot be without it"
        ) from None
    return decode_manifest(data, str(path))


def decode_manifest(data: bytes, where: str = MANIFEST) -> Manifest:
    """A manifest from any bytes; see `problems_of`. Raises SchemaError."""
    try:
        found = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise schema_error(error, what=f"{where} is no manifest: ", hint=DAMAGED) from None
    if found.format != FORMAT:
        raise SchemaError(f"{where} is of format {found.format}, this version reads {FORMAT}")
    return found


def problems_of(manifest: Manifest) -> Iterator[str]:
    """What does not hold inside a manifest, one line each; nothing of its files is looked at."""
    if not all(1 <= count <= PARTITIONS_MAX for count in manifest.topics.values()):
        yield "a topic has no partitions"
        return
    chain = genesis(manifest.run, manifest.topics)
    ends: dict[TopicPartition, int] = {}
    for entry in manifest.entries:
        if chain_of(chain, entry) != entry.chain:
            yield f"the entry of {entry.name}, or one before it, was changed or taken out (chain)"
            return
        chain = entry.chain
        yield from _problems_of_entry(manifest, entry, ends.get(entry.at, 0))
        ends[entry.at] = entry.end
    yield from _problems_of_cut(manifest, ends)


def _problems_of_entry(manifest: Manifest, entry: Entry, expected: int) -> Iterator[str]:
    if not 0 <= entry.partition < manifest.topics.get(entry.topic, 0):
        yield f"{entry.name} is of a partition that the archive does not have"
    if entry.start != expected:
        yield f"{entry.name} begins at {entry.start}, the one before it ended at {expected}"
    if not entry.start < entry.end <= POSITION_MAX:
        yield f"{entry.name} ends at {entry.end}, before it begins"
    if not 0 <= entry.bytes <= SEGMENT_BYTES_MAX:
        yield f"{entry.name} holds {entry.bytes} bytes, more than a segment may"
    named = file_name(entry.at, entry.start) if entry.records else ""
    if entry.file != named:
        yield f"the entry of {named or 'no records'} names another file: {entry.file}"


def _problems_of_cut(manifest: Manifest, ends: Mapping[TopicPartition, int]) -> Iterator[str]:
    if manifest.cut.keys() != manifest.topics.keys():
        yield "its cut is not of its topics"
        return
    for topic, positions in manifest.cut.items():
        if len(positions) != manifest.topics[topic]:
            yield f"its cut is not of the partitions of {topic}"
        for partition, position in enumerate(positions):
            end = ends.get(TopicPartition(topic, partition), 0)
            if not 0 <= position <= end:
                yield f"{topic}/{partition} is cut at {position}, its segments end at {end}"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Replace the manifest, all or nothing. Raises BusFull, ResourceError."""
    with unfinished(directory / MANIFEST) as path:
        path.write_bytes(msgspec.json.format(_ENCODER.encode(manifest), indent=1) + b"\n")


@contextmanager
def unfinished(final: Path) -> Iterator[Path]:
    """A path to write to; it becomes `final` when the block ends well. Raises BusFull,
    ResourceError when the disk refuses."""
    path = final.with_name(f"{TEMPORARY}{final.name}")
    try:
        yield path
        sync(path)
        path.replace(final)
        sync(final.parent)
    except OSError as error:
        raise refused(final, error) from error
    finally:
        path.unlink(missing_ok=True)


def refused(path: Path, error: OSError) -> BusFull | ResourceError:
    """What the disk said when `path` was to be written, as our error."""
    if error.errno in NO_ROOM:
        return BusFull(f"no room left for the archive in {path.parent}", hint=AGAIN)
    return ResourceError(
        f"cannot write {path}: {error.strerror or error}", hint="another folder, or its rights"
    )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
