"""The Kafka client's event loop without a thread: woken by whom it must be, within its limits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kafka import errors as kafka_errors
from kafka.future import Future
from kafka.net.compat import KafkaNetClient
from kafka.net.selector import NetworkSelector
from kafka.producer import kafka as kafka_producer
from kafka.protocol.frame import KafkaBytes

from dora_pipe.bus.kafka.bus import _retry_without_leader
from dora_pipe.bus.kafka.client import NEWS_S, PatientClient
from dora_pipe.bus.kafka.driven import (
    RECEIVE_BYTES,
    DrivenClient,
    DrivenConsumer,
    DrivenLoop,
    DrivenProducer,
    _receive,
)

NOBODY = "127.0.0.1:1"  # nothing listens there


@pytest.fixture
def loop() -> Iterator[DrivenLoop]:
    loop = DrivenLoop()
    yield loop
    loop.close()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a stream that never block."""
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    yield pair
    for end in pair:
        end.close()


def counted(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[str]:
    """A line for each call of a method that goes on as before."""
    calls: list[str] = []
    whole: Callable[..., Any] = getattr(owner, name)

    def count(*arguments: Any, **named: Any) -> Any:
        calls.append(name)
        return whole(*arguments, **named)

    monkeypatch.setattr(owner, name, count)
    return calls


def test_it_starts_no_thread_and_its_caller_runs_it(loop: DrivenLoop) -> None:
    before = threading.active_count()
    loop.start()

    async def answer() -> int:
        return threading.get_ident()

    assert loop.run(answer) == threading.get_ident()
    assert threading.active_count() == before


def test_a_socket_that_takes_bytes_is_not_waited_for(
    loop: DrivenLoop, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = counted(monkeypatch, NetworkSelector, "wait_write")

    async def write() -> int:
        await loop.wait_write(ends[0])
        return ends[0].send(b"x")

    assert loop.run(write) == 1
    assert waits == []


def test_a_full_socket_is_waited_for_until_somebody_reads(
    loop: DrivenLoop, ends: tuple[socket.socket, socket.socket]
) -> None:
    writes, reads = ends
    size = 0
    while True:
        try:
            size += writes.send(b"x" * 65536)
        except BlockingIOError:
            break
    written: list[int] = []

    async def write() -> None:
        await loop.wait_write(writes)
        written.append(writes.send(b"y"))

    loop.call_soon(write)
    loop.poll(timeout_ms=1)
    loop.poll(timeout_ms=1)
    assert written == []
    while size > 0:
        size -= len(reads.recv(65536))
    while not written:
        loop.poll(timeout_ms=1000)
    assert written == [1]


def test_one_socket_may_be_waited_for_in_both_directions(
    loop: DrivenLoop, ends: tuple[socket.socket, socket.socket]
) -> None:
    seen: list[str] = []

    async def wait(what: str, until: Callable[[socket.socket, float], Any]) -> None:
        await until(ends[0], time.monotonic() + 60)
        seen.append(what)

    loop.call_soon(wait("read", loop.wait_read))
    loop.poll(timeout_ms=0)
    loop.call_soon(wait("write", loop.wait_write))
    while not seen:
        loop.poll(timeout_ms=1000)
    assert seen == ["write"]
    ends[1].send(b"x")
    while len(seen) < 2:
        loop.poll(timeout_ms=1000)
    assert seen == ["write", "read"]


def test_only_another_thread_wakes_it(loop: DrivenLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = counted(monkeypatch, NetworkSelector, "wakeup")
    loop.call_soon_threadsafe(lambda: None)
    loop.poll(timeout_ms=0)
    assert wakes == [], "nobody sleeps in it while its only caller is elsewhere"
    asleep, woken = threading.Event(), Future()

    def wake() -> None:
        asleep.wait(10)
        loop.call_soon_threadsafe(lambda: woken.success(None))

    other = threading.Thread(target=wake)
    other.start()
    loop.call_soon(asleep.set)
    loop.poll(timeout_ms=10_000, future=woken)
    other.join()
    assert woken.is_done
    assert wakes == ["wakeup"]


def test_no_wait_of_a_client_goes_beyond_its_limit_and_then_it_gives_up() -> None:
    client = DrivenClient(bootstrap_servers=NOBODY)
    given_up: list[bool] = []
    client.give_up = lambda: given_up.append(True)
    assert client._bounded_ms(None) is None
    assert client._bounded_ms(7.0) == 7.0
    client.until_s = time.monotonic() + 100
    assert client._bounded_ms(7.0) == 7.0
    assert 0 < (client._bounded_ms(None) or 0) <= 100_000
    assert given_up == []
    client.until_s = time.monotonic() - 1
    client.poll(timeout_ms=60_000, future=Future())
    assert given_up == [True]
    client.close()


@pytest.mark.parametrize("kind", [DrivenClient, PatientClient])
def test_a_closed_door_is_no_error_and_is_not_tried_again_at_once(
    kind: Callable[..., KafkaNetClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender would forget its request to a transaction's coordinator."""
    slept: list[float] = []
    answers: list[bool] = []

    def await_ready(*_: object, **__: object) -> bool:
        if not answers:
            raise kafka_errors.KafkaConnectionError("not ready")
        return answers.pop()

    monkeypatch.setattr(KafkaNetClient, "await_ready", await_ready)
    client = kind(bootstrap_servers=NOBODY)
    monkeypatch.setattr("time.sleep", slept.append)
    assert client.await_ready("coordinator-1", timeout_ms=5) is False
    assert slept == [NEWS_S]
    answers.append(True)
    assert client.await_ready("coordinator-1", timeout_ms=5) is True
    assert slept == [NEWS_S], "one that is there is ready at once"
    client.close()


@pytest.mark.parametrize("kind", [DrivenClient, PatientClient])
def test_a_broker_that_the_cluster_names_no_more_is_one_that_is_not_ready(
    kind: Callable[..., KafkaNetClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that dies is still the leader of partitions until there is another."""
    client = kind(bootstrap_servers=NOBODY)
    asked = counted(monkeypatch, type(client._manager.cluster), "request_update")
    assert client.ready(3) is False
    client.maybe_connect(3)
    assert len(asked) == 2
    client.close()


def test_a_question_to_such_a_broker_is_asked_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[object] = [kafka_errors.UnknownBrokerIdError(3), "offset"]

    def call() -> object:
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(found, Exception):
            raise found
        return found

    assert _retry_without_leader(call) == "offset"
    answers[:] = [kafka_errors.UnknownBrokerIdError(3)]
    monkeypatch.setattr("dora_pipe.bus.kafka.bus.LEADER_LIMIT_S", 0.1)
    with pytest.raises(kafka_errors.UnknownBrokerIdError):
        _retry_without_leader(call)


@pytest.mark.parametrize("kind", [DrivenProducer, DrivenConsumer])
def test_without_a_broker_it_says_so_and_leaves_no_thread(kind: Callable[..., Any]) -> None:
    before = threading.active_count()
    with pytest.raises(kafka_errors.KafkaTimeoutError):
        kind(bootstrap_servers=NOBODY, bootstrap_timeout_ms=100)
    assert threading.active_count() == before


def test_a_sender_whose_client_is_not_driven_is_the_thread_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = [counted(monkeypatch, threading.Thread, name) for name in ("start", "join")]
    sender = kafka_producer.Sender(KafkaNetClient(), None, None)
    monkeypatch.setattr(sender, "run", lambda: None)
    sender.start()
    sender.join(10)
    assert calls == [["start"], ["join"]]
    sender._client.close()


class Door:
    """A transport of the client's, as far as receiving looks at it."""

    def __init__(self, sock: socket.socket | None, answer: KafkaBytes | None = None) -> None:
        self._sock = sock
        self._protocol = self
        self.parser = self
        self._receiving = answer is not None
        self._rbuffer = answer


def test_the_rest_of_an_answer_is_received_into_its_place_but_for_its_last_byte(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """The client takes that byte, and finds the answer whole."""
    sent = bytes(range(256)) * 4
    answer = KafkaBytes(10 + len(sent))
    answer.write(b"0123456789")
    door = Door(ends[0], answer)
    for size, last in ((300, b""), (len(sent) - 300, sent[-1:])):
        at = answer.tell() - 10
        ends[1].sendall(sent[at : at + size])
        assert _receive(door) == (last, None)
    assert answer[:-1] == b"0123456789" + sent[:-1]
    assert answer.tell() == len(answer) - 1
    ends[1].sendall(b"and the next one")
    assert _receive(door) == (b"and the next one", None)


def test_a_large_answer_is_read_as_a_small_one_and_its_records_are_not_copied(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    sizes = (RECEIVE_BYTES, RECEIVE_BYTES + 1)
    small, large = (KafkaBytes(size) for size in sizes)
    for answer in (small, large):
        answer.write(bytes(range(256)) * (len(answer) // 256))
        _receive(Door(ends[0], answer))
        answer.seek(0)
        assert answer.read(4) == b"\x00\x01\x02\x03"
        assert bytes(answer.read()) == bytes(answer)[4:]
        assert answer.tell() == len(answer) and bytes(answer.read()) == b""
    assert isinstance(small, KafkaBytes) and type(small) is KafkaBytes
    large.seek(4)
    shown = large.read()
    assert isinstance(shown, memoryview) and shown.obj is large


def test_what_is_small_is_received_whole_and_nothing_is_no_error(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    assert _receive(Door(ends[0])) == (b"", None)
    ends[1].sendall(b"x" * 3000)
    assert _receive(Door(ends[0])) == (b"x" * 3000, None)


@pytest.mark.parametrize("answer", [None, 100])
def test_who_hung_up_or_was_closed_is_told_as_the_client_tells_it(
    ends: tuple[socket.socket, socket.socket], answer: int | None
) -> None:
    ends[1].close()
    for sock in (ends[0], None):
        door = Door(sock, None if answer is None else KafkaBytes(answer))
        data, error = _receive(door)
        assert data == b"" and isinstance(error, kafka_errors.KafkaConnectionError)
