"""kafka-python without its threads and with one loop for its records, for the sake of speed.

Whoever waits for an answer moves the bytes meanwhile. The client has a thread beside every producer
and every consumer: an append passes its record to one and is woken by it, a poll likewise, and each
hand-over costs a wake-up, a turn of the interpreter's lock and cold caches, a fourth of the CPU
time of a single record, and most of its switches. Our appends and polls are calls that end before
the next begins, so nothing needs to happen in between; what has a time of its own there (metadata,
idle connections, a broker's farewell) happens at the beginning of the next call.

Exclusive writers keep the thread: their brokers' coordinators have to be found, awaited and asked
again, and a transaction costs far more than a hand-over.
"""

from __future__ import annotations

import math
import select
import selectors
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from kafka import KafkaConsumer, KafkaProducer
from kafka import errors as kafka_errors
from kafka.net.selector import NetworkSelector, Task
from kafka.producer import kafka as kafka_producer
from kafka.producer.sender import Sender
from kafka.protocol.frame import KafkaBytes

from dora_pipe.bus.kafka.client import PatientClient
from dora_pipe.bus.kafka.records import ByteCount, Unpacked
from dora_pipe.bus.port import Record

CLOSE_LIMIT_S: Final = 1.0
"""For another thread to leave the producer that is being closed."""

COMING_LIMIT_S: Final = 0.02
"""For the rest of an answer whose beginning is there: a poll that may not wait takes it too."""

IDLE_MS: Final = 5
"""Who cannot ask yet, because nobody is connected, looks again so soon if nothing happens."""

RECEIVE_BYTES: Final = 64 * 1024
"""Taken from a socket at a time."""

_NOTHING_NOW: Final = (
    BlockingIOError,
    InterruptedError,
    ssl.SSLWantReadError,
    ssl.SSLWantWriteError,
)

SEND_EVERY_BYTES: Final = 256 * 1024
"""An append hands on what is full so often, so that the broker works while it goes on."""


class DrivenLoop(NetworkSelector):  # type: ignore[misc]  # the client has no types
    """The client's event loop, moved by its callers; it saves the system calls of a thread's."""

    _let_through: Task | None = None

    def start(self) -> None:
        """No thread: `run` drives the loop where none is started."""

    def wakeup(self) -> None:
        """Only another thread can be asleep in here."""
        if self._poll_owner not in (None, threading.current_thread()):
            super().wakeup()

    def register_event(self, fileobj: Any, event: int, task: Any) -> None:
        """As the client does, without asking first: its miss asks the kernel for both addresses."""
        task = task if isinstance(task, Task) else Task(task)
        waiting = (task, None) if event == selectors.EVENT_READ else (None, task)
        try:
            self._selector.register(fileobj, event, waiting)
        except KeyError:
            super().register_event(fileobj, event, task)

    def wait_write(self, fileobj: Any, timeout_at: float | None = None) -> Any:
        """A socket nearly always takes what is written: look, before a turn of waiting for it.

        Once per task: where TLS has to read before it can write, others must have their turn.
        """
        if timeout_at is None and self._current is not self._let_through:
            look = select.poll()
            look.register(fileobj, select.POLLOUT)
            if look.poll(0):
                self._let_through = self._current
                return _AtOnce()
        return super().wait_write(fileobj, timeout_at)


class _AtOnce:
    """Nothing to wait for."""

    def __await__(self) -> Iterator[None]:
        return iter(())


class DrivenClient(PatientClient):
    """The client's connections on such a loop; no wait goes beyond `until_s`."""

    refusals = kafka_errors.KafkaConnectionError

    def __init__(self, **settings: Any) -> None:
        super().__init__(net=DrivenLoop(**settings), **settings)
        self._plain_build = self._manager._build_transport
        self._manager._build_transport = self._build
        self.busy = threading.Lock()
        """Held by the thread that moves the bytes of a producer."""
        self.until_s = math.inf
        self.give_up: Callable[[], None] = _nothing
        """Called when the wait is over: what tries again and again must not do so for ever."""

    async def _build(self, node: Any, timeout_at: float | None = None) -> Any:
        transport = await self._plain_build(node, timeout_at=timeout_at)
        transport._sock_recv = partial(_receive, transport)
        return transport

    def poll(self, timeout_ms: float | None = None, future: Any = None) -> None:
        """Move bytes, at most until `until_s`."""
        super().poll(timeout_ms=self._bounded_ms(timeout_ms), future=future)

    def await_ready(self, node_id: Any, timeout_ms: float | None = 30_000) -> bool:
        """The same within `until_s`."""
        return super().await_ready(node_id, timeout_ms=self._bounded_ms(timeout_ms))

    def _bounded_ms(self, timeout_ms: float | None) -> float | None:
        if self.until_s == math.inf:
            return timeout_ms
        left_ms = max(0.0, (self.until_s - time.monotonic()) * 1000)
        if not left_ms:
            self.give_up()
        return left_ms if timeout_ms is None else min(timeout_ms, left_ms)


def _receive(transport: Any) -> tuple[bytes, Exception | None]:
    """What has come, or why nothing more will; the client takes 4 KiB at a time, and copies.

    An answer whose beginning is there is received into its place, but for its last byte.
    """
    came: list[bytes] = []
    sock, transport._moved_s = transport._sock, time.monotonic()
    try:
        if not _fill(sock, transport._protocol.parser):
            return b"", _hung_up()
        while data := sock.recv(RECEIVE_BYTES):
            came.append(data)
            if not isinstance(sock, ssl.SSLSocket):
                break  # the rest goes into its place; TLS may hold more than its socket shows
        else:
            return b"", _hung_up()
    except _NOTHING_NOW:
        pass
    except (OSError, AttributeError) as error:  # it has no socket when it was closed meanwhile
        return b"", kafka_errors.KafkaConnectionError(error)
    return b"".join(came), None


def _fill(sock: Any, parser: Any) -> bool:
    """Whether somebody is still there; raises what a socket does that has nothing now."""
    answer: Any = parser._rbuffer if parser is not None and parser._receiving else b""
    if len(answer) > RECEIVE_BYTES:
        answer.__class__ = _Large
    while len(answer) > 1 and (start := answer.tell()) < len(answer) - 1:
        with memoryview(answer) as whole, whole[start:-1] as place:
            size = sock.recv_into(place)
        if not size:
            return False
        answer.seek(start + size)
    return True


class _Large(KafkaBytes):  # type: ignore[misc]  # the client has no types
    """An answer of many records: the client copies it twice before it looks at one."""

    _idx: int

    def read(self, nbytes: int | None = None) -> Any:
        """As the client's, but the rest is shown and not copied."""
        if nbytes is not None:
            return super().read(nbytes)
        start, self._idx = self._idx, len(self)
        return memoryview(self)[start:]


def _hung_up() -> Exception:
    error: Exception = kafka_errors.KafkaConnectionError("socket disconnected")
    return error


class _DrivenSender(Sender):  # type: ignore[misc]  # the client has no types
    """The client's sender; a thread only where its client is not driven."""

    def start(self) -> None:
        if not isinstance(self._client, DrivenClient):
            super().start()

    def join(self, timeout: float | None = None) -> None:
        """Do what the thread does at its end, unless another one is in there that will not end."""
        if not isinstance(self._client, DrivenClient):
            super().join(timeout)
        elif self._client.busy.acquire(timeout=CLOSE_LIMIT_S):
            try:
                self._force_close = True  # a flush went before: nothing waits that could be sent
                self.run()
            finally:
                self._client.busy.release()


kafka_producer.Sender = _DrivenSender
"""A producer makes its sender by this name and starts it at once; there is no other way in."""


class DrivenProducer(KafkaProducer):  # type: ignore[misc]  # the client has no types
    """An idempotent producer without a thread, for appends that wait for all acknowledgements.

    `send` may send what is full, `flush` sends everything and waits. One thread uses it; another
    one may close it meanwhile, and then what waits fails.
    """

    def __init__(self, **settings: Any) -> None:
        self._held_bytes = 0
        super().__init__(kafka_client=DrivenClient, **settings)
        self._driven: DrivenClient = self._sender._client
        self._driven.give_up = self._sender.force_close

    def send(self, topic: str, value: bytes | None = None, **named: Any) -> Any:
        """The future of a record, which moves only while somebody sends or flushes."""
        future = super().send(topic, value=value, **named)
        self._held_bytes += len(value or b"")
        if self._held_bytes >= SEND_EVERY_BYTES:
            self._held_bytes = 0
            self._hand_on()
        return future

    def flush(self, timeout: float | None = None) -> None:
        """Send all, and wait until everything is acknowledged or has failed."""
        self._held_bytes = 0
        if self._sender._force_close:
            return  # whoever closes it tells all that wait
        until_s = math.inf if timeout is None else time.monotonic() + timeout
        if not self._driven.busy.acquire(timeout=-1 if timeout is None else timeout):
            raise kafka_errors.KafkaTimeoutError("another thread waits in this producer")
        self._accumulator.begin_flush()
        try:
            self._drive(until_s)
        finally:
            self._accumulator._flushes_in_progress.decrement()
            self._driven.busy.release()

    def _drive(self, until_s: float) -> None:
        self._driven.until_s = until_s
        try:
            while self._accumulator.has_incomplete:
                if self._sender._force_close or time.monotonic() > until_s:
                    raise kafka_errors.KafkaTimeoutError("not acknowledged in time")
                self._sender.run_once()
                if not self._accumulator.has_incomplete:
                    break
                if not self._accumulator.has_undrained():
                    self._driven.poll()  # all is on the wire: nothing to do before an answer
                elif any(each.initializing for each in self._driven._manager._conns.values()):
                    self._driven.poll(timeout_ms=IDLE_MS)  # the sender would ask without a pause
        finally:
            self._driven.until_s = math.inf

    def _hand_on(self) -> None:
        """Send what is full, take what has come, and wait for nothing."""
        state = self._transaction_manager
        if state.has_producer_id() and not state.has_error() and not state.is_bumping_epoch():
            with self._driven.busy:
                self._sender._send_producer_data()
                self._driven.poll(timeout_ms=0)

    def _wait_on_metadata(self, topic: str, max_wait_ms: float) -> Any:
        """Partitions of a topic that was not asked for yet; the client's own waits for a thread."""
        until_s = time.monotonic() + max_wait_ms / 1000
        self._metadata.add_topic(topic)
        while (partitions := self._metadata.partitions_for_topic(topic)) is None:
            left_ms = (until_s - time.monotonic()) * 1000
            if left_ms <= 0:
                raise kafka_errors.KafkaTimeoutError(f"no news of topic {topic}")
            news = self._metadata.request_update()
            with self._driven.busy:
                self._driven.poll(timeout_ms=left_ms, future=news)
            if news.failed() and not news.retriable():
                raise news.exception
            if topic in self._metadata.unauthorized_topics:
                raise kafka_errors.TopicAuthorizationFailedError({topic})
        return partitions


class DrivenConsumer(KafkaConsumer):  # type: ignore[misc]  # the client has no types
    """A consumer without a thread. What comes between two polls waits on the wire.

    Who reads on and on has the broker work on the next answer while it uses this one. Who seeks may
    seek again, and an answer that is under way for the old position would hold up the next one.
    """

    def __init__(self, **settings: Any) -> None:
        self._answers = 0
        """Polls since the last seek that brought records."""
        self._idle_ms = 0
        super().__init__(kafka_client=DrivenClient, **settings)
        self._unpacked = ByteCount()
        self.came_bytes = 0
        """What the records of the last poll take, or a bit more."""
        self.held: set[tuple[str, int]] = set()
        """Partitions whose last answer ended before an open transaction. A broker leaves out of its
        answers what has not changed, and whatever ends a transaction is a change."""
        self._plain_parse = self._fetcher._parse_fetched_data
        self._fetcher._parse_fetched_data = self._parse
        self._plain_fetch = self._fetcher.fetch_records
        self._fetcher.fetch_records = self._fetch
        self._fetcher.send_fetches = self._ask
        self._fetcher.PartitionRecords = partial(Unpacked, count=self._unpacked)

    def seek(self, partition: Any, offset: int) -> None:
        self._answers = 0
        super().seek(partition, offset)

    def poll(self, timeout_ms: int, max_records: int) -> dict[Any, list[Record]]:
        """Our records by partition; what is just coming in is taken whole, as by a thread."""
        self._idle_ms = min(timeout_ms, IDLE_MS)
        self._take_in()
        before = self._unpacked.bytes
        found: dict[Any, list[Record]] = super().poll(timeout_ms, max_records=max_records)
        self.came_bytes = self._unpacked.bytes - before
        if found:
            self._answers += 1
            if self._answers > 1 and self._has_nothing():
                self._ask()
                self._net.poll(timeout_ms=0)
        return found

    def _parse(self, came: Any) -> Any:
        """Note what the client throws away: how far records go, and how far they may be read."""
        at, found = came.topic_partition, came.partition_data
        if found.error_code == 0:
            stable, written = found.last_stable_offset, found.high_watermark
            (self.held.add if 0 <= stable < written else self.held.discard)(tuple(at))
        return self._plain_parse(came)

    def _ask(self) -> Any:
        """The client asks in a coroutine that never waits, to be on its thread; here we all are."""
        asking = self._fetcher._send_fetches_async()
        try:
            asking.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("asking for records does not wait")

    def _fetch(self, *arguments: Any, **named: Any) -> tuple[Any, bool]:
        """Where nobody can be asked yet the client would sleep, deaf to those who connect."""
        found, idle = self._plain_fetch(*arguments, **named)
        if idle:
            self._net.poll(timeout_ms=self._idle_ms)
        return found, False

    def receives(self, since_s: float) -> bool:
        """Whether part of an answer came since then, and its rest is still to come."""
        conns = list(self._manager._conns.values())
        return any(_is_coming(each) and each.transport._moved_s >= since_s for each in conns)

    def _has_nothing(self) -> bool:
        """Neither here nor under way."""
        fetcher = self._fetcher
        return not fetcher._completed_fetches and not fetcher._nodes_with_pending_fetch_requests

    def _take_in(self) -> None:
        until_s = time.monotonic() + COMING_LIMIT_S
        self._net.poll(timeout_ms=0)
        while any(map(_is_coming, list(self._manager._conns.values()))):
            left_ms = (until_s - time.monotonic()) * 1000
            if left_ms <= 0:
                break
            self._net.poll(timeout_ms=left_ms)


def _is_coming(connection: Any) -> bool:
    return connection.parser is not None and connection.parser._receiving


def _nothing() -> None:
    """Nobody waits."""
