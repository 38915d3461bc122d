"""Strikes a role at the moment that it was ordered to, and writes down what was acknowledged.

It wraps what a role is handed (bus, policy store, engine, trainer); the role itself is production
code and knows nothing. Of a process that was killed two files tell afterwards: a line for each
record whose append was acknowledged, and a page of memory that says what the process was doing.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec

from dora_pipe.bench.faults.order import Order, Point
from dora_pipe.bus.base import BusWrapper
from dora_pipe.bus.port import Append, Bus, Reader, TopicPartition, Writer
from dora_pipe.bus.sqlite import SqliteBus, SqliteWriter
from dora_pipe.bus.sqlite_file import SqliteFile
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.store.names import BlobKind
from dora_pipe.store.store import PolicyStore, PublishedVersion

T = TypeVar("T")

PAGE_BYTES: Final = 256
IN_THE_LOOP: Final = "reacting"
"""What the main thread does between two marks."""


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

    def doing_path(self, role: str) -> Path:
        """What the newest incarnation of a role is doing."""
        return self.directory / f"{role}.where"

    def acks(self, role: str) -> list[Ack]:
        """The acknowledged records of a role; a last line that was cut off is left out."""
        if not self.acks_path(role).exists():
            return []
        decode = msgspec.json.Decoder(Ack).decode
        *lines, _ = self.acks_path(role).read_bytes().split(b"\n")
        return [decode(line) for line in lines]

    def doing(self, role: str) -> str:
        """What it is doing, in words."""
        path = self.doing_path(role)
        text = path.read_bytes() if path.exists() else b""
        return text.rstrip(b" \0").decode(errors="replace") or "being forked"

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

    @property
    def told(self) -> Path:
        """What agents were answered."""
        return self.directory / "told.jsonl"

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
        self._main = threading.get_ident()
        self._marks: dict[int, list[str]] = {self._main: []}
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._acks = os.open(files.acks_path(role), flags, 0o644)
        self._page = _page(files.doing_path(role))
        self._say("starting")

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

    @contextmanager
    def mark(self, doing: str) -> Iterator[None]:
        """Inside the block, this thread is doing that; other threads count only inside of one."""
        marks = self._marks.setdefault(threading.get_ident(), [])
        marks.append(doing)
        self._say_what()
        try:
            yield
        finally:
            marks.pop()
            self._say_what()

    def _say_what(self) -> None:
        main = self._marks[self._main]
        doing = [main[-1] if main else IN_THE_LOOP]
        for thread, marks in list(self._marks.items()):
            doing += marks[-1:] if thread != self._main else ()
        self._say(", beside it ".join(doing))

    def _say(self, text: str) -> None:
        self._page[:] = text.encode()[:PAGE_BYTES].ljust(PAGE_BYTES)


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

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return watched(self.inner.reader(positions), {"poll": "reading"}, self._injector)

    def writer(self, *, exclusive: str | None = None) -> Writer:
        with self._injector.mark("opening a writer"):
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
        with injector.mark(f"appending {kinds_of(records, injector.topics)}"):
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

        with self._injector.mark("publishing weights"):
            version = super().publish_version(writing, before=before, whole=whole)
            self._injector.passed("named", "weights")
        return version

    def _publish(self, path: Path, name: str) -> None:
        super()._publish(path, name)
        if name.startswith("patches/"):
            self._injector.passed("named", "patch")

    def publish_blob(self, kind: BlobKind, write: Callable[[Path], None]) -> Blob:
        """See PolicyStore."""
        with self._injector.mark(f"publishing {kind}"):
            return super().publish_blob(kind, write)


class _Watched:
    """Hands everything on; calls of some methods are marked."""

    def __init__(self, inner: object, marks: Mapping[str, str], injector: Injector) -> None:
        self._inner = inner
        self._marks = marks
        self._injector = injector

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        doing = self._marks.get(name)
        if doing is None:
            return found

        def marked(*arguments: Any, **named: Any) -> Any:
            with self._injector.mark(doing):
                return found(*arguments, **named)

        return marked


def watched(inner: T, marks: Mapping[str, str], injector: Injector) -> T:
    """An object as it was, whose methods in `marks` say what the process is doing meanwhile."""
    return cast("T", _Watched(inner, marks, injector))


def kinds_of(records: Sequence[Append], topics: Topics) -> str:
    """What an append holds, in words. Example: ``"trajectories, metrics"``."""
    names: dict[str, None] = {}
    for one in records:
        name = one.topic.removeprefix(f"{topics.run}.")
        if one.topic == topics.control:
            name = str(msgspec.json.decode(one.value)["kind"])
        names[name] = None
    return ", ".join(names)


def _page(path: Path) -> mmap.mmap:
    """A page of memory that outlives the process as a file."""
    path.write_bytes(b" " * PAGE_BYTES)
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), PAGE_BYTES)
