"""A forger of archives: changes records and makes every digest of the archive itself fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import msgspec

from dora_pipe.bus.archive.manifest import (
    SEGMENTS,
    Entry,
    chain_of,
    genesis,
    read_manifest,
    write_manifest,
)
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.segment import Segment, write_segment
from dora_pipe.bus.port import Record


def rewrite(place: Path, change: Callable[[Record], Record], topic: str) -> None:
    """Change the records of a topic (named without its run), with entries and a chain that fit."""
    manifest = read_manifest(place)
    entries: list[Entry] = []
    chain = genesis(manifest.run, manifest.topics)
    with closing(ArchiveBus(place)) as bus:
        for entry in manifest.entries:
            if entry.records and entry.topic.endswith(f".{topic}"):
                segment = bus.segment(entry)
                records = [change(one) for one in _records(segment)]
                written = write_segment(place / SEGMENTS / entry.file, records)
                entry = msgspec.structs.replace(
                    entry,
                    bytes=written.bytes,
                    file_bytes=written.file_bytes,
                    sha256=written.sha256,
                )
            chain = chain_of(chain, entry)
            entries.append(msgspec.structs.replace(entry, chain=chain))
    write_manifest(place, msgspec.structs.replace(manifest, entries=tuple(entries)))


def _records(segment: Segment) -> Iterator[Record]:
    position = 0
    while found := segment.batch_from(position):
        yield from found
        position = found[-1].offset + 1
