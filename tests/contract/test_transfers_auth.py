"""Transfers between machines: who is let in, and what strangers cost."""

from __future__ import annotations

import io
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import flight

from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers import flight as ours
from dora_pipe.store.transfers import transfers
from dora_pipe.store.transfers.transfers import Lost
from tests.contract.test_transfers_flight import NAME, WAIT_S, offered, put_weights
from tests.support.transfers import HOST, RUN, TOKEN, served

# Who is let in


@pytest.mark.parametrize(
    ("token", "run"),
    [(b"another token that is long", RUN), (b"", RUN), (TOKEN, "another-run")],
    ids=["another token", "no token", "another run"],
)
def test_peer_without_the_token_of_the_run_gets_nothing(
    token: bytes, run: str, tmp_path: Path
) -> None:
    with served(tmp_path / "a") as source, served(tmp_path / "b", token=token, run=run) as stranger:
        blob = offered(source)
        put_weights(tmp_path / "a")
        assert stranger.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.REFUSED)
        assert stranger.copy(source.address, NAME, io.BytesIO()) == Lost(transfers.REFUSED)
        stranger.drop(blob)
        assert isinstance(source.fetch(blob, timeout_s=WAIT_S), np.ndarray)


def hello(client: Any, nonce: bytes) -> bytes:
    options = flight.FlightCallOptions(timeout=WAIT_S)
    (answer,) = client.do_action(flight.Action(ours.HELLO, nonce), options)
    return bytes(answer.body.to_pybytes())


@pytest.mark.parametrize("nonce", [b"", b"x" * 31, b"x" * 33, b"x" * 10_000])
def test_hello_without_a_nonce_is_refused(nonce: bytes, tmp_path: Path) -> None:
    with served(tmp_path / "a") as source:
        client = flight.FlightClient(source.address)
        with pytest.raises(flight.FlightUnauthenticatedError) as refused:
            hello(client, nonce)
        client.close()
        assert "Traceback" not in str(refused.value)


def _shown(nonce: bytes, answer: bytes, token: bytes = TOKEN, who: bytes = b"client") -> bytes:
    return nonce + ours.proof(token, RUN, who, nonce, answer[:32])


NONCE, OTHER_NONCE = b"n" * 32, b"m" * 32

WRONG: dict[str, Callable[[bytes], list[str]]] = {
    "nothing": lambda answer: [],
    "no hex": lambda answer: ["x" * 128],
    "too short": lambda answer: [_shown(NONCE, answer).hex()[:-2]],
    "nothing behind the nonce": lambda answer: [NONCE.hex()],
    "another nonce": lambda answer: [_shown(OTHER_NONCE, answer).hex()],
    "another token": lambda answer: [_shown(NONCE, answer, token=TOKEN[1:]).hex()],
    "the server's own proof": lambda answer: [(NONCE + answer[32:]).hex()],
    "two of them": lambda answer: [_shown(NONCE, answer).hex()] * 2,
}


@pytest.mark.parametrize("case", [*WRONG, "the right proof"])
def test_call_without_the_right_proof_is_refused(case: str, tmp_path: Path) -> None:
    with served(tmp_path / "a") as source:
        blob = offered(source)
        name = f"kv/{blob.sha256}".encode()
        client = flight.FlightClient(source.address)
        answer = hello(client, NONCE)
        right = case not in WRONG
        shown = [_shown(NONCE, answer).hex()] if right else WRONG[case](answer)
        options = flight.FlightCallOptions(
            timeout=WAIT_S, headers=[(ours.HEADER.encode(), line.encode()) for line in shown]
        )
        with nullcontext() if right else pytest.raises(flight.FlightUnauthenticatedError):
            assert len(list(client.do_get(flight.Ticket(name), options))) == 3
        with nullcontext() if right else pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_action(flight.Action("drop", name), options))
        client.close()
        assert isinstance(source.fetch(blob, timeout_s=WAIT_S), np.ndarray) == (not right)


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "list_flights": lambda client, options: list(client.list_flights(options=options)),
    "list_actions": lambda client, options: list(client.list_actions(options)),
    "get_flight_info": lambda client, options: client.get_flight_info(
        flight.FlightDescriptor.for_path(b"x"), options
    ),
    "get_schema": lambda client, options: client.get_schema(
        flight.FlightDescriptor.for_path(b"x"), options
    ),
    "do_put": lambda client, options: client.do_put(
        flight.FlightDescriptor.for_path(b"x"), ours.SCHEMA, options
    )[0].close(),
    "do_exchange": lambda client, options: client.do_exchange(
        flight.FlightDescriptor.for_path(b"x"), options
    )[1].read_chunk(),
}


@pytest.mark.parametrize("call", CALLS)
def test_stranger_is_refused_at_every_other_door(call: str, tmp_path: Path) -> None:
    with served(tmp_path / "a") as source:
        client = flight.FlightClient(source.address)
        with pytest.raises((flight.FlightUnauthenticatedError, OSError), match="wrong token"):
            CALLS[call](client, flight.FlightCallOptions(timeout=WAIT_S))
        client.close()


def test_token_never_travels_and_proofs_fit_one_pair_of_nonces(tmp_path: Path) -> None:
    with served(tmp_path / "a") as source, served(tmp_path / "b") as other:
        answers = []
        for peer in (source, source, other):
            client = flight.FlightClient(peer.address)
            answers.append(hello(client, NONCE))
            client.close()
    first, second, third = answers
    assert first[32:] == ours.proof(TOKEN, RUN, b"server", NONCE, first[:32])
    assert TOKEN not in first
    assert first == second and first[:32] != third[:32], "each server has a secret of its own"
    proofs = {
        ours.proof(token, run, who, client, server)
        for token in (TOKEN, TOKEN[1:])
        for run in (RUN, "other")
        for who in (b"server", b"client")
        for client, server in ((b"a" * 32, b"b" * 32), (b"b" * 32, b"a" * 32))
    }
    assert len(proofs) == 16


def test_peer_that_does_not_know_the_token_learns_no_proof(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []

    class Impostor(flight.FlightServerBase):  # type: ignore[misc]
        def do_action(self, context: Any, action: Any) -> Any:
            heard.append((action.type, len(action.body.to_pybytes())))
            return iter([b"s" * 64])

        def do_get(self, context: Any, ticket: Any) -> Any:
            heard.append(("do_get", 0))
            raise flight.FlightServerError("no")

    server = Impostor(f"grpc://{HOST}:0")
    with served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=f"grpc://{HOST}:{server.port}")
        assert target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.REFUSED)
    server.shutdown()
    server.wait()
    assert heard == [(ours.HELLO, 32)]


# Strangers who hold on

STRANGERS = 200
THREADS_MORE_MAX = 20
"""gRPC's own, which do not grow with callers."""
SETTLED_S = 60.0
"""While many calls come at once, gRPC takes threads to refuse them, and gives those back."""


def threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def silent(address: str) -> socket.socket:
    host, _, number = address.removeprefix("grpc://").rpartition(":")
    return socket.create_connection((host, int(number)), timeout=WAIT_S)


def half_a_call(method: bytes) -> Callable[[str], socket.socket]:
    def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
        return (
            struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload
        )

    def literal(name: bytes, value: bytes) -> bytes:
        return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value

    headers = literal(b":method", b"POST") + literal(b":scheme", b"http")
    headers += literal(b":path", b"/arrow.flight.protocol.FlightService/" + method)
    headers += literal(b":authority", b"localhost") + literal(b"te", b"trailers")
    headers += literal(b"content-type", b"application/grpc")

    def begin(address: str) -> socket.socket:
        opened = silent(address)
        opened.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        opened.sendall(frame(4, 1, 0) + frame(1, 4, 1, headers))
        return opened

    return begin


@pytest.mark.parametrize(
    "begin",
    [silent, half_a_call(b"Handshake"), half_a_call(b"DoAction"), half_a_call(b"DoPut")],
    ids=["silent", "handshake", "action", "put"],
)
def test_strangers_who_are_silent_hold_no_thread(
    begin: Callable[[str], socket.socket], tmp_path: Path
) -> None:
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target, ExitStack() as stack:
        blob = offered(source)
        before = threads()
        for _ in range(STRANGERS):
            stack.enter_context(begin(source.address))
        until_s = time.monotonic() + SETTLED_S
        while threads() - before >= THREADS_MORE_MAX and time.monotonic() < until_s:
            time.sleep(0.02)
        assert threads() - before < THREADS_MORE_MAX
        began_s = time.monotonic()
        assert isinstance(target.fetch(blob, timeout_s=WAIT_S), np.ndarray)
        assert time.monotonic() - began_s < WAIT_S / 2
