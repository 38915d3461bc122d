"""Tests of connections to wrong or broken servers."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from queue import Queue

import pytest

from dora_pipe.bus.kafka import access as access
from dora_pipe.bus.kafka.access import check_advertised, probe, split, unreachable
from dora_pipe.bus.kafka.security import PASSWORD_VARIABLE, PLAINTEXT, KafkaSecurity
from dora_pipe.core.errors import AccessRefused, BusError

SECRET = "s3cret-42"
WAIT_S = 30.0
CLEAR = KafkaSecurity(protocol="SASL_PLAINTEXT", mechanism="PLAIN", username="w0")

Door = Callable[[Callable[[socket.socket], object]], str]


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    monkeypatch.setattr(access, "PROBE_WAIT_S", 0.2)
    monkeypatch.setenv(PASSWORD_VARIABLE, SECRET)
    opened: list[tuple[socket.socket, threading.Thread]] = []

    def open_door(visit: Callable[[socket.socket], object]) -> str:
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                try:
                    visitor, _ = listener.accept()
                except OSError:
                    return
                with visitor:
                    visit(visitor)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        opened.append((listener, thread))
        return f"127.0.0.1:{listener.getsockname()[1]}"

    yield open_door
    for listener, thread in opened:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(WAIT_S)


def answer(visitor: socket.socket, body: bytes) -> bytes:
    (size,) = struct.unpack(">i", visitor.recv(4))
    request = visitor.recv(size)
    visitor.sendall(struct.pack(">ii", len(body) + 4, 0) + body)
    return request


def enter(visitor: socket.socket) -> None:
    answer(visitor, NO_SASL)
    with suppress(struct.error):  # clients without SASL stop here
        answer(visitor, BROKERS)


def offers(*mechanisms: bytes) -> bytes:
    names = b"".join(struct.pack(">h", len(mechanism)) + mechanism for mechanism in mechanisms)
    return struct.pack(">hi", 0, len(mechanisms)) + names


NO_SASL = struct.pack(">hi", 34, 0)
BROKERS = struct.pack(">iih5sihii", 1, 7, 5, b"k.one", 9092, -1, 7, 0)
"""Answer of a cluster with broker k.one:9092 and no topics."""
NAMED = ["k.one:9092"]
REFUSED = struct.pack(">hh", 58, -1) + struct.pack(">i", 0)
WELCOME = struct.pack(">hh", 0, -1) + struct.pack(">i", 0)


@pytest.mark.parametrize("text", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL", "SASL_PLAINTEXT"])
def test_a_door_that_hangs_up_or_is_no_kafka_is_no_answer(
    door: Door, text: bytes, protocol: str
) -> None:
    came: Queue[int] = Queue()

    def hang_up(visitor: socket.socket) -> None:
        came.put(1)
        visitor.sendall(text)

    assert probe([door(hang_up)], replace(CLEAR, protocol=protocol)) == []
    assert came.get(timeout=WAIT_S)


def test_a_listener_without_tls_is_told_from_one_that_hangs_up(door: Door) -> None:
    def listen(visitor: socket.socket) -> None:
        if visitor.recv(1, socket.MSG_PEEK) == b"\x00":  # a TLS handshake begins with 0x16
            answer(visitor, NO_SASL)

    with pytest.raises(AccessRefused, match="speaks no TLS") as refused:
        probe([door(listen)], KafkaSecurity(protocol="SSL"))
    assert "bus.protocol" in (refused.value.hint or "")


def test_a_door_that_says_nothing_is_no_answer(door: Door) -> None:
    came: Queue[int] = Queue()
    release = threading.Event()

    def wait(visitor: socket.socket) -> None:
        came.put(1)
        release.wait(WAIT_S)

    assert probe([door(wait)], PLAINTEXT) == []
    release.set()
    assert came.get(timeout=WAIT_S)


def test_nobody_at_all_is_no_answer_too() -> None:
    assert probe(["127.0.0.1:1"], PLAINTEXT) == []


def test_a_listener_without_sasl_is_entered_without(door: Door) -> None:
    address = door(enter)
    assert probe([address], PLAINTEXT) == NAMED
    with pytest.raises(AccessRefused, match="asks for no password"):
        probe([address], CLEAR)


def test_no_password_leaves_before_the_listener_takes_its_kind(door: Door) -> None:
    heard: Queue[bytes] = Queue()

    def listen(visitor: socket.socket) -> None:
        heard.put(answer(visitor, offers(b"SCRAM-SHA-512", b"GSSAPI")))
        visitor.settimeout(WAIT_S)
        heard.put(visitor.recv(1000))

    with pytest.raises(AccessRefused, match="offers SCRAM-SHA-512, GSSAPI, not PLAIN") as refused:
        probe([door(listen)], CLEAR)
    assert "bus.mechanism" in (refused.value.hint or "")
    assert b"PLAIN" in heard.get(timeout=WAIT_S)
    assert heard.get(timeout=WAIT_S) == b"", "and then it hangs up"


@pytest.mark.parametrize(("end", "lets_in"), [(WELCOME, True), (REFUSED, False)])
def test_a_login_is_taken_or_refused(door: Door, end: bytes, lets_in: bool) -> None:
    heard: Queue[bytes] = Queue()

    def listen(visitor: socket.socket) -> None:
        heard.put(answer(visitor, offers(b"PLAIN")))
        heard.put(answer(visitor, end))
        if lets_in:
            answer(visitor, BROKERS)

    address = door(listen)
    if lets_in:
        assert probe([address], CLEAR) == NAMED
    else:
        with pytest.raises(AccessRefused, match="wrong name or password") as refused:
            probe([address], CLEAR)
        assert SECRET not in f"{refused.value.message}{refused.value.hint}"
    assert b"PLAIN" in heard.get(timeout=WAIT_S)
    login = heard.get(timeout=WAIT_S)
    assert f"\0w0\0{SECRET}".encode() in login, "the test hears what a broker hears"


def test_a_broker_that_cannot_prove_that_it_knows_the_password_is_refused(door: Door) -> None:
    scram = KafkaSecurity(protocol="SASL_PLAINTEXT", username="w0")

    def listen(visitor: socket.socket) -> None:
        answer(visitor, offers(b"SCRAM-SHA-512"))
        token = b"r=somebody-else,s=c2FsdA==,i=4096"
        answer(visitor, struct.pack(">hhi", 0, -1, len(token)) + token)

    with pytest.raises(AccessRefused):
        probe([door(listen)], scram)


def test_what_listens_and_does_not_answer_is_told_from_what_does_not_listen(door: Door) -> None:
    silent = unreachable(["127.0.0.1:1"], PLAINTEXT)
    assert "check bus.url" in (silent.hint or "") and "127.0.0.1:1" in silent.message
    there = unreachable([door(lambda visitor: None)], PLAINTEXT)
    assert "connected, but no answer" in there.message


@pytest.mark.parametrize("server", ["host", "host:", ":9092", "host:x", "host:99999"])
def test_an_address_needs_a_host_and_a_port(server: str) -> None:
    with pytest.raises(BusError, match="not a broker address"):
        split(server)
    with pytest.raises(BusError, match="not a broker address"):
        probe([server], PLAINTEXT)


def test_an_address_may_be_one_of_version_six() -> None:
    assert split("[::1]:9092") == ("::1", 9092)


def test_a_host_without_an_address_is_named_and_not_what_waited_for_it() -> None:
    error = unreachable(["no-such-host.invalid:9092", "127.0.0.1:1"], PLAINTEXT)
    assert error.message == (
        "no Kafka broker answers at no-such-host.invalid:9092,127.0.0.1:1: "
        "cannot resolve no-such-host.invalid"
    )
    assert "DNS" in (error.hint or "")
    alone = unreachable(["127.0.0.1:1"], PLAINTEXT)
    assert alone.message == "no Kafka broker answers at 127.0.0.1:1: connection refused"


def test_a_name_service_that_is_away_accuses_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    assert "cannot resolve" not in unreachable(["k.example:9092"], PLAINTEXT).message


@pytest.mark.parametrize("advertised", ["no-such-host.invalid:9092", "127.0.0.1:1"])
def test_a_cluster_that_sends_its_clients_where_nobody_answers_is_named(
    door: Door, advertised: str
) -> None:
    there = door(lambda visitor: None)
    with pytest.raises(BusError, match=rf"sends clients to {advertised} \(.+\), which") as refused:
        check_advertised([advertised], [there])
    assert there in refused.value.message
    assert "advertised.listeners" in (refused.value.hint or "")
    check_advertised([advertised, there], [there])
    check_advertised([], [there])


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_a_host_that_no_name_service_could_be_asked_for_is_no_address(host: str) -> None:
    with pytest.raises(BusError, match="is not a broker address"):
        split(f"{host}:9092")
