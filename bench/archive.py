"""Measures how fast a log is archived, and an archive read, beside reading SQLite; decides nothing.

Records look like trajectories to an archive: a value that no codec can shrink, fifteen headers, one
of them the value's sha256, which archiving checks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.audit.archive import Archiver, verify
from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.port import Append, Bus, TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex

PARTITIONS: Final = 4
HEADERS: Final = 15
_CALL_BYTES: Final = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFigure:
    """One pass over the same records; 1 MB is 10^6 bytes of values.

    Example: ``ArchiveFigure(what="read archive", record_bytes=4096, records=16384,
    records_per_s=180000.0, mb_per_s=737.0, cpu_us=5.5)``
    """

    what: str
    record_bytes: int
    records: int
    records_per_s: float
    mb_per_s: float
    cpu_us: float
    """CPU time of this process per record."""


def bench_archive(
    folder: Path, *, record_bytes: Sequence[int], total_bytes: int
) -> list[ArchiveFigure]:
    """Archive a SQLite log, read it, read the archive, verify it; about `total_bytes` each."""
    figures = []
    for size_bytes in record_bytes:
        place = folder / str(size_bytes)
        place.mkdir()
        topics, count = Topics("bench"), max(PARTITIONS, total_bytes // size_bytes)
        with closing(SqliteBus(place / "log.sqlite")) as bus:
            _fill(bus, topics, size_bytes, count)
            figures += _figures(bus, topics, place / "kept", size_bytes, count)
    return figures


def _figures(
    bus: SqliteBus, topics: Topics, kept: Path, size_bytes: int, count: int
) -> list[ArchiveFigure]:
    def archive() -> int:
        with closing(Archiver(bus, topics, kept)) as archiver:
            return archiver.once().records

    def read_archive() -> int:
        with closing(ArchiveBus(kept)) as archived:
            return _read(archived, topics)

    steps: dict[str, Callable[[], int]] = {
        "read SQLite": lambda: _read(bus, topics),
        "archive": archive,
        "read archive": read_archive,
        "verify": lambda: verify(kept).records,
    }
    return [_timed(what, step, size_bytes, count) for what, step in steps.items()]


def _timed(what: str, step: Callable[[], int], size_bytes: int, count: int) -> ArchiveFigure:
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    done = step()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    assert done == count, f"{what}: {done} of {count} records"
    return ArchiveFigure(
        what=what,
        record_bytes=size_bytes,
        records=count,
        records_per_s=count / wall_s,
        mb_per_s=count * size_bytes / wall_s / 1e6,
        cpu_us=cpu_s / count * 1e6,
    )


def _fill(bus: SqliteBus, topics: Topics, size_bytes: int, count: int) -> None:
    names = [TopicSpec(name=one) for one in topics.all() if one != topics.trajectories]
    room_bytes = 2 * size_bytes + 4096
    wide = TopicSpec(
        name=topics.trajectories, partitions=PARTITIONS, record_bytes_max=max(4096, room_bytes)
    )
    bus.create([*names, wide])
    per_call = max(1, _CALL_BYTES // size_bytes)
    with closing(bus.writer()) as writer:
        for first in range(0, count, per_call):
            writer.append(
                [_record(topics, size_bytes, n) for n in range(first, min(first + per_call, count))]
            )


def _record(topics: Topics, size_bytes: int, number: int) -> Append:
    value = os.urandom(size_bytes)
    headers = [(f"name-{place}", b"0000000042") for place in range(HEADERS - 1)]
    return Append(
        topic=topics.trajectories,
        partition=number % PARTITIONS,
        key=b"g%010d" % number,
        value=value,
        headers=(*headers, ("sha256", sha256_hex(value).encode())),
    )


def _read(bus: Bus, topics: Topics) -> int:
    return sum(1 for _ in records_of(bus, ends_of(bus, topics.trajectories)))
