"""Kills a role at an aimed moment and writes down the records whose append was acknowledged.

It wraps the bus and the policy store that a role is handed; the role itself is production code.
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
from dora_pipe.bus.port import Append, Bus, Writer
from dora_pipe.bus.sqlite import SqliteBus, SqliteWriter
from dora_pipe.bus.sqlite_file import SqliteFile
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.store.store import PolicyStore, PublishedVersion
from tests.support.kill_rounds.order import Order, Point


class Ack(msgspec.Struct, frozen=True, array_like=True):
    """One acknowledged record; times are this machine's monotonic clock."""

    at_ns: int
    pid: int
    topic: str
    partition: int
    offset: int
    sha256: str
    """Of the value."""
    began_ns: int = 0
    """When its append began."""


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A role or a broker was struck."""

    role: str
    pid: int
    phase: str
    at_ns: int
    led: tuple[tuple[str, int], ...] = ()
    """The partitions that a struck broker led; empty: all."""
    down_s: float = 0.0
    """As the order had it."""


class Files:
    """Where a round keeps its own notes, beside the run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.order = directory / "order.json"
        self.hit = directory / "hit.json"

    def acks_path(self, role: str) -> Path:
        """The acknowledged records of a role, all its incarnations."""
        return self.directory / f"{role}.acks"

    def acks(self, role: str) -> list[Ack]:
        """The acknowledged records of a role; a last line that was cut off is left out."""
        if not self.acks_path(role).exists():
            return []
        decode = msgspec.json.Decoder(Ack).decode
        *lines, _ = self.acks_path(role).read_bytes().split(b"\n")
        return [decode(line) for line in lines]

    def write_hit(self, hit: Hit, nth: int = 0) -> None:
        """All or nothing: whoever waits for the file may read it. `nth`: of a round's strikes."""
        path = self.hit.with_stem(f"hit-{nth}") if nth else self.hit
        partial = path.with_suffix(f".{hit.pid}.partial")
        partial.write_bytes(msgspec.json.encode(hit))
        partial.replace(path)

    def read_hits(self) -> list[Hit]:
        """All that were struck, the first first."""
        written = [path.read_bytes() for path in self.directory.glob("hit*.json")]
        hits = [msgspec.json.decode(one, type=Hit) for one in written]
        return sorted(hits, key=lambda hit: hit.at_ns)

    def read_hit(self) -> Hit | None:
        """Who was struck, if anybody was."""
        if not self.hit.exists():
            return None
        return msgspec.json.decode(self.hit.read_bytes(), type=Hit)

    @property
    def claimed(self) -> Path:
        """The order, once the incarnation that it is for has taken it."""
        return self.order.with_suffix(".claimed")

    def dead_until_ns(self, role: str) -> int:
        """Until when (monotonic ns) a role that was struck stays dead; 0: it may begin."""
        dead = [hit for hit in self.read_hits() if hit.role == role and hit.down_s]
        return max((hit.at_ns + round(hit.down_s * 1e9) for hit in dead), default=0)


class Injector:
    """Of one incarnation of a role. It is armed if the round's order is for this role and no
    incarnation before it was."""

    def __init__(self, files: Files, role: str, topics: Topics) -> None:
        self.topics = topics
        self._files = files
        self._role = role
        self._order = self._claim()
        self._passed = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._acks = os.open(files.acks_path(role), flags, 0o644)

    def _claim(self) -> Order | None:
        """The order if it is an aimed one for this role, given to one incarnation only."""
        if not self._files.order.exists():
            return None
        order = msgspec.json.decode(self._files.order.read_bytes(), type=Order)
        if order.role != self._role or not isinstance(order.at, Point):
            return None
        self._files.order.rename(self._files.claimed)
        return order

    @property
    def point(self) -> Point | None:
        """Where this incarnation shall be struck."""
        at = None if self._order is None else self._order.at
        return at if isinstance(at, Point) else None

    def due(self, records: Sequence[Append]) -> Point | None:
        """The point if these records make it due now; counts them."""
        point = self.point
        if point is None or not any(point.matches(record, self.topics) for record in records):
            return None
        self._passed += 1
        return point if self._passed == point.nth else None

    def passed(self, moment: str, what: str) -> None:
        """A point that is no append was reached; strikes if it is the one."""
        point = self.point
        if point is not None and (point.moment, point.what) == (moment, what):
            self._passed += 1
            if self._passed == point.nth:
                self.strike()

    def strike(self) -> None:
        """End this process as `kill -9` does, or stop it; a stopped one goes on from here."""
        assert self._order is not None
        assert isinstance(self._order.at, Point)
        order, phase, pid = self._order, self._order.at.phase, os.getpid()
        self._order = None
        hit = Hit(
            role=self._role,
            pid=pid,
            phase=phase,
            at_ns=time.monotonic_ns(),
            down_s=order.down_s,
        )
        self._files.write_hit(hit)
        os.kill(pid, signal.SIGSTOP if order.stop else signal.SIGKILL)

    def acknowledged(
        self, records: Sequence[Append], offsets: Sequence[int], *, began_ns: int
    ) -> None:
        """Write down what the bus has promised to keep."""
        now_ns, pid = time.monotonic_ns(), os.getpid()
        acks = (
            Ack(now_ns, pid, one.topic, one.partition, offset, sha256_hex(one.value), began_ns)
            for one, offset in zip(records, offsets, strict=True)
        )
        os.write(self._acks, b"".join(msgspec.json.encode(ack) + b"\n" for ack in acks))


Arm = Callable[[Point, Callable[[], None]], None]
"""Strike once, inside of the append that comes next.

There is no hook in production code. SQLite calls a trace with each statement as it begins: the rows
are in when COMMIT does. The Kafka client is wrapped in the process that is to be struck, and only
there: an exclusive writer's records are acknowledged when its commit begins; a plain writer has no
commit, and is met when its first record was handed to the client, which sends it a moment later.
"""


def _arm_sqlite(file: SqliteFile, point: Point, strike: Callable[[], None]) -> None:
    """Inside of the transaction of one writer's connection."""
    commits = [point]

    def on(statement: str) -> None:
        if statement == "COMMIT" and commits:
            _strike(commits.pop(), strike)

    file.connection.set_trace_callback(on)


def _arm_kafka(exclusive: bool, point: Point, strike: Callable[[], None]) -> None:
    """Of all producers of this process that are, or are not, exclusive; a role has one of each."""
    from kafka import KafkaProducer

    name = "commit_transaction" if exclusive else "send"
    whole = getattr(KafkaProducer, name)

    def commit(producer: Any, *arguments: Any, **named: Any) -> Any:
        setattr(KafkaProducer, name, whole)
        _strike(point, strike)
        return whole(producer, *arguments, **named)

    def send(producer: Any, *arguments: Any, **named: Any) -> Any:
        future = whole(producer, *arguments, **named)
        if producer.config["transactional_id"] is None:  # the other one may be at it too
            setattr(KafkaProducer, name, whole)
            _strike(point, strike)
        return future

    setattr(KafkaProducer, name, commit if exclusive else send)


def _strike(point: Point, strike: Callable[[], None]) -> None:
    if point.moment == "commit":
        threading.Timer(point.delay_s, strike).start()
    else:
        strike()


class FaultBus(BusWrapper):
    """A bus whose writers strike their own process when they are told to.

    Its writers on SQLite have their connection made here: that is how a moment inside of the
    transaction can be met.
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
                KafkaBus,  # a round on SQLite does without the client
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
    """See FaultBus. Without `arm` the moments `middle` and `commit` never come."""

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
    """A policy store that strikes its own process around the name of a policy file."""

    def __init__(self, root: Path, injector: Injector) -> None:
        super().__init__(root)
        self._injector = injector

    def publish_version(
        self, write: Callable[[Path], Manifest], *, before: str, whole: bool
    ) -> PublishedVersion:
        """See PolicyStore."""

        def writing(path: Path) -> Manifest:
            manifest = write(path)
            self._injector.passed("written", "weights")
            return manifest

        version = super().publish_version(writing, before=before, whole=whole)
        self._injector.passed("named", "weights")
        return version

    def _publish(self, path: Path, name: str) -> None:
        super()._publish(path, name)
        if name.startswith("patches/"):
            self._injector.passed("named", "patch")
