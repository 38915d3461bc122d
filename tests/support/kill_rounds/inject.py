"""Aimed kills and a log of acknowledged records.

Wraps the bus and policy store of production roles.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.bus.base import BusWrapper
from dora_pipe.bus.bus import Bus, Writer
from dora_pipe.bus.sqlite import SqliteBus, SqliteWriter
from dora_pipe.bus.sqlite_file import SqliteFile
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.store.store import PolicyStore, PublishedVersion
from tests.support.kill_rounds.order import Order, Point


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """Acknowledged record; times are monotonic ns of this machine."""

    at_ns: int
    pid: int
    topic: str
    partition: int
    offset: int
    sha256: str
    """sha256 of the value."""
    began_ns: int = 0
    """Start of its append."""


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    pid: int
    phase: str
    at_ns: int
    led: tuple[tuple[str, int], ...] = ()
    """Partitions that a broker led; empty: all."""
    down_s: float = 0.0
    """Downtime of the order."""


class Files:
    """Notes of a round, stored next to the run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.order = directory / "order.json"
        self.hit = directory / "hit.json"

    def acks_path(self, role: str) -> Path:
        return self.directory / f"{role}.acks"

    def acks(self, role: str) -> list[Ack]:
        """Return a role's acknowledged records, without a truncated last line."""
        if not self.acks_path(role).exists():
            return []
        decode = msgspec.json.Decoder(Ack).decode
        *lines, _ = self.acks_path(role).read_bytes().split(b"\n")
        return [decode(line) for line in lines]

    def write_hit(self, hit: Hit, nth: int = 0) -> None:
        """Write atomically: readers poll the file. `nth` counts a round's strikes."""
        path = self.hit.with_stem(f"hit-{nth}") if nth else self.hit
        partial = path.with_suffix(f".{hit.pid}.partial")
        partial.write_bytes(msgspec.json.encode(hit))
        partial.replace(path)

    def read_hits(self) -> list[Hit]:
        written = [path.read_bytes() for path in self.directory.glob("hit*.json")]
        hits = [msgspec.json.decode(entry, type=Hit) for entry in written]
        return sorted(hits, key=lambda hit: hit.at_ns)

    def read_hit(self) -> Hit | None:
        if not self.hit.exists():
            return None
        return msgspec.json.decode(self.hit.read_bytes(), type=Hit)

    @property
    def claimed(self) -> Path:
        """Return the order's path after its incarnation took it."""
        return self.order.with_suffix(".claimed")

    def dead_until_ns(self, role: str) -> int:
        """Return the end (monotonic ns) of a role's downtime, or 0."""
        dead = [hit for hit in self.read_hits() if hit.role == role and hit.down_s]
        return max((hit.at_ns + round(hit.down_s * 1e9) for hit in dead), default=0)


class Injector:
    """Injector of one incarnation; armed if the order is for this role and no earlier
    incarnation took it."""

    def __init__(self, files: Files, role: str, topics: Topics) -> None:
        self.topics = topics
        self._files = files
        self._role = role
        self._order = self._blob()
        self._passed = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._acks = os.open(files.acks_path(role), flags, 0o644)

    def _blob(self) -> Order | None:
        if not self._files.order.exists():
            return None
        order = msgspec.json.decode(self._files.order.read_bytes(), type=Order)
        if order.role != self._role or not isinstance(order.at, Point):
            return None
        self._files.order.rename(self._files.claimed)
        return order

    @property
    def point(self) -> Point | None:
        point = None if self._order is None else self._order.at
        return point if isinstance(point, Point) else None

    def due(self, records: Sequence[Append]) -> Point | None:
        """Count these records and return the point if it is due."""
        point = self.point
        if point is None or not any(point.matches(record, self.topics) for record in records):
            return None
        self._passed += 1
        return point if self._passed == point.nth else None

    def passed(self, moment: str, what: str) -> None:
        """Strike if this is the point, one without an append."""
        point = self.point
        if point is not None and (point.moment, point.what) == (moment, what):
            self._passed += 1
            if self._passed == point.nth:
                self.strike()

    def strike(self) -> None:
        """Kill or stop this process; a stopped one continues from here."""
        assert self._order is not None
        assert isinstance(self._order.at, Point)
        order, phase, pid = self._order, self._order.at.phase, os.getpid()
        self._order = None
        hit = Hit(
            role=self._role, pid=pid, phase=phase, at_ns=time.monotonic_ns(), down_s=order.down_s
        )
        self._files.write_hit(hit)
        # Signal this thread: after `os.kill` it could begin its append before the process stops.
        signal.raise_signal(signal.SIGSTOP if order.stop else signal.SIGKILL)

    def acknowledged(
        self, records: Sequence[Append], offsets: Sequence[int], *, began_ns: int
    ) -> None:
        now_ns, pid = time.monotonic_ns(), os.getpid()
        acks = (
            Ack(
                now_ns,
                pid,
                record.topic,
                record.partition,
                offset,
                sha256_hex(record.value),
                began_ns,
            )
            for record, offset in zip(records, offsets, strict=True)
        )
        os.write(self._acks, b"".join(msgspec.json.encode(ack) + b"\n" for ack in acks))


Arm = Callable[[Point, Callable[[], None]], None]
"""Arranges one strike inside the next append.

Production code has no hooks. SQLite's trace reports each statement before it runs, so rows exist at
COMMIT. The Kafka client is patched in the process to kill. An exclusive writer is struck when its
commit begins, a plain one after its first record reached the client.
"""


def _arm_sqlite(file: SqliteFile, point: Point, strike: Callable[[], None]) -> None:
    commits = [point]

    def on(statement: str) -> None:
        if statement == "COMMIT" and commits:
            _strike(commits.pop(), strike)

    file.connection.set_trace_callback(on)


def _arm_kafka(exclusive: bool, point: Point, strike: Callable[[], None]) -> None:
    from kafka import KafkaProducer

    name = "commit_transaction" if exclusive else "send"
    full = getattr(KafkaProducer, name)

    def commit(producer: Any, *arguments: Any, **named: Any) -> Any:
        setattr(KafkaProducer, name, full)
        _strike(point, strike)
        return full(producer, *arguments, **named)

    def send(producer: Any, *arguments: Any, **named: Any) -> Any:
        future = full(producer, *arguments, **named)
        if producer.config["transactional_id"] is None:  # the other producer may be active too
            setattr(KafkaProducer, name, full)
            _strike(point, strike)
        return future

    setattr(KafkaProducer, name, commit if exclusive else send)


def _strike(point: Point, strike: Callable[[], None]) -> None:
    if point.moment == "commit":
        threading.Timer(point.delay_s, strike).start()
    else:
        strike()


class FaultBus(BusWrapper):
    """Bus whose writers can kill their process.

    SQLite writers connect here, so that strikes inside a transaction are possible.
    """

    def __init__(self, inner: Bus, injector: Injector) -> None:
        super().__init__(inner)
        self._injector = injector
        self._writers: list[Writer] = []

    def writer(self, *, exclusive: str | None = None) -> Writer:
        inner, arm = self._open(exclusive)
        return FaultWriter(inner, arm, self._injector)

    def _open(self, exclusive: str | None) -> tuple[Writer, Arm | None]:
        if not isinstance(self.inner, SqliteBus):
            from dora_pipe.bus.kafka.bus import (
                KafkaBus,  # SQLite rounds do not need the client
            )

            on_kafka = isinstance(self.inner, KafkaBus)
            arm = partial(_arm_kafka, exclusive is not None) if on_kafka else None
            return self.inner.writer(exclusive=exclusive), arm
        file = SqliteFile(self.inner.path, patient=False)
        self._writers.append(SqliteWriter(file, exclusive))
        return self._writers[-1], partial(_arm_sqlite, file)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
        self.inner.close()


class FaultWriter(Writer):
    """Writer that can kill its process; without `arm`, moments `middle` and `commit` never come."""

    def __init__(self, inner: Writer, arm: Arm | None, injector: Injector) -> None:
        self._inner = inner
        self._arm = arm
        self._injector = injector

    def append(self, records: Sequence[Append]) -> list[int]:
        injector = self._injector
        point = injector.due(records)
        moment = None if point is None else point.moment
        if moment == "before":
            injector.strike()
        if point is not None and moment in ("middle", "commit") and self._arm is not None:
            self._arm(point, injector.strike)
        began_ns = time.monotonic_ns()
        offsets = self._inner.append(records)
        injector.acknowledged(records, offsets, began_ns=began_ns)
        if moment == "after":
            injector.strike()
        return offsets

    def close(self) -> None:
        self._inner.close()


class FaultStore(PolicyStore):
    """Policy store that can kill its process before or after a policy file is renamed."""

    def __init__(self, root: Path, injector: Injector) -> None:
        super().__init__(root)
        self._injector = injector

    def publish_version(
        self, write: Callable[[Path], Manifest], *, before: str, whole: bool
    ) -> PublishedVersion:
        def writing(path: Path) -> Manifest:
            manifest = write(path)
            self._injector.passed("written", "weights")
            return manifest

        version = super().publish_version(writing, before=before, whole=whole)
        self._injector.passed("named", "weights")
        return version

    def _publish(self, path: Path, name: str) -> None:
        super()._publish(path, name)
        if name.startswith("deltas/"):
            self._injector.passed("named", "delta")
