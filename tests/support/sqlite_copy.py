"""A log as a SQLite file with every record at its offset, whatever bus it lies on."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec

from dora_pipe.audit.reading import records_of
from dora_pipe.bus.port import Bus, TopicPartition, TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.schemas.topics import Topics


def copy_log(bus: Bus, topics: Topics, path: Path) -> None:
    """Write the topics of a run to a new file; offsets stay, so rounds name what they named."""
    names = topics.all()
    made = SqliteBus(path)
    made.create([TopicSpec(name=name, partitions=bus.partitions(name)) for name in names])
    made.close()
    with closing(sqlite3.connect(path)) as log:
        numbers = dict(log.execute("SELECT name, id FROM topics").fetchall())
        for name in names:
            for partition in range(bus.partitions(name)):
                at = TopicPartition(name, partition)
                base = numbers[name] << 52 | partition << 40
                rows = (
                    (base | one.offset, one.key, _packed(one.headers), one.value)
                    for one in records_of(bus, {at: bus.end(at)})
                )
                log.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
        log.commit()


def _packed(headers: tuple[tuple[str, bytes], ...]) -> bytes | None:
    return msgspec.msgpack.encode(headers) if headers else None
