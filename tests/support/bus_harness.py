"""Harnesses of the bus contract: memory, SQLite and Kafka."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus, TopicSpec, Writer
from dora_pipe.bus.kafka.bus import KafkaBus, KafkaWriter
from dora_pipe.bus.kafka.client import send
from dora_pipe.bus.memory import AppendFault, MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus, SqliteWriter
from dora_pipe.core.errors import OutcomeUnknown
from dora_pipe.core.pure.records import Append, TopicPartition
from tests.support.bus_steps import ScriptedFaults

ALL_LAND = 1 << 30


class _Opener:
    waits = True
    shared = True
    url = ""

    def __init__(self) -> None:
        self._opened: list[Bus] = []
        self._names = 0
        self._prefix = ""

    def topic(self, name: str) -> str:
        self._names += 1
        return f"{self._prefix}{name}{self._names}"

    def keep(self, bus: Bus) -> Bus:
        self._opened.append(bus)
        return bus

    def leave_open(self, topic: str) -> Callable[[], None] | None:
        return None

    def close(self) -> None:
        for bus in self._opened:
            bus.close()


class MemoryHarness(_Opener):
    waits = False
    shared = False

    def __init__(self, log: MemoryLog | None = None, bus: type[MemoryBus] = MemoryBus) -> None:
        super().__init__()
        self.log = MemoryLog() if log is None else log
        self._bus = bus
        self._ms = 0

    def open(self) -> Bus:
        return self.keep(self._bus(self.log, now_ms=lambda: self._ms))

    def leave_open(self, topic: str) -> Callable[[], None] | None:
        """Start an append that delays visibility of all records after it."""
        late = ScriptedFaults(appends={0: AppendFault(kind="delayed", delay_ms=1)})
        bus = MemoryBus(self.log, faults=late, now_ms=lambda: self._ms)
        bus.writer().append([Append(topic=topic, value=b"open")])

        def end() -> None:
            self._ms += 1

        return end

    def make_next_append_unknown(self, writer: Writer) -> None:
        bus: MemoryBus = writer._bus  # type: ignore[attr-defined]
        fault = AppendFault(kind="unknown", lands=ALL_LAND)
        bus.faults = ScriptedFaults(appends={bus.appends: fault})


class SqliteHarness(_Opener):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "log.sqlite"
        self.url = f"sqlite:{self.path}"

    def open(self) -> Bus:
        return self.keep(SqliteBus(self.path))

    def make_next_append_unknown(self, writer: Writer) -> None:
        assert isinstance(writer, SqliteWriter)
        file = writer._file
        file.connection = FailingCommit(file.connection)  # type: ignore[assignment]


class FailingCommit:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._fails = True

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        done = self._connection.execute(statement, *values)
        if statement == "COMMIT" and self._fails:
            self._fails = False
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class KafkaHarness(_Opener):
    def __init__(self, bootstrap: str) -> None:
        super().__init__()
        self.bootstrap = bootstrap
        self.url = f"kafka://{bootstrap}"
        self._prefix = f"{uuid4().hex[:8]}."

    def open(self) -> Bus:
        return self.keep(KafkaBus([self.bootstrap]))

    def leave_open(self, topic: str) -> Callable[[], None] | None:
        """Open a transaction with an acknowledged record; the writer's successor ends it."""
        name, bus = self.topic("dead"), self.open()
        dead = bus.writer(exclusive=name)
        leave_open(dead, Append(topic=topic, value=b"open"))

        def end() -> None:
            bus.writer(exclusive=name)

        return end

    def make_next_append_unknown(self, writer: Writer) -> None:
        assert isinstance(writer, KafkaWriter)
        append, drop = writer._append, writer._drop

        def lose_the_answer(producer: object, records: Sequence[Append]) -> list[int]:
            append(producer, records)
            raise OutcomeUnknown("no answer")

        def drop_and_heal() -> None:
            writer._append = append  # type: ignore[method-assign]
            drop()

        writer._append = lose_the_answer  # type: ignore[method-assign]
        writer._drop = drop_and_heal  # type: ignore[method-assign]


def leave_open(writer: Writer, record: Append) -> int:
    """Simulate death between acknowledgement and commit; return the offset."""
    assert isinstance(writer, KafkaWriter) and writer._producer is not None
    writer._producer.begin_transaction()
    return int(send(writer._producer, record).get(30).offset)


def log_in_memory(bus: Bus) -> MemoryLog:
    log = MemoryLog()
    names = {topic: bus.partitions(topic) for topic in bus.topics()}
    MemoryBus(log).create([TopicSpec(name=name, partitions=count) for name, count in names.items()])
    for tp in (TopicPartition(name, part) for name in names for part in range(names[name])):
        records = list(records_of(bus, {tp: bus.end(tp)}, start=bus.begin(tp)))
        held = log._partitions[tp]
        held.records, held.offsets = records, [record.offset for record in records]
        held.visible_ms, held.end = [0] * len(records), bus.end(tp)
    return log
