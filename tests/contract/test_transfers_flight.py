"""Transfers between machines: who is let in, and what a broken peer costs."""

from __future__ import annotations

import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from pyarrow import flight

from dora_pipe.schemas.policy import Blob
from dora_pipe.transfers import flight_auth, flight_client, flight_server, port
from dora_pipe.transfers.flight import FlightTransfers
from dora_pipe.transfers.port import Lost
from tests.support.transfers import HOST, RUN, TOKEN, mute_peer, nobody, served

WAIT_S = 20.0
DATA = np.arange(3 * 1024 * 1024, dtype=np.uint32).tobytes()
"""Three chunks of a stream."""
NAME = "weights/" + "d" * 64 + ".safetensors"


def offered(transfers: FlightTransfers, data: bytes = DATA) -> Blob:
    """A blob that was taken."""
    blob = transfers.offer([memoryview(data)])
    assert isinstance(blob, Blob)
    return blob


def put_weights(folder: Path, data: bytes = DATA) -> None:
    """A file of the policy store of the machine in this folder."""
    path = folder / "policies" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# Who is let in


@pytest.mark.parametrize(
    ("token", "run"),
    [(b"another token that is long", RUN), (b"", RUN), (TOKEN, "another-run")],
    ids=["another token", "no token", "another run"],
)
def test_peer_without_the_token_of_the_run_gets_nothing(
    token: bytes, run: str, tmp_path: Path
) -> None:
    with (
        served(tmp_path / "a") as source,
        served(tmp_path / "b", token=token, run=run) as stranger,
    ):
        blob = offered(source)
        put_weights(tmp_path / "a")
        assert stranger.fetch(blob, timeout_s=WAIT_S) == Lost(port.REFUSED)
        assert stranger.copy(source.address, NAME, io.BytesIO()) == Lost(port.REFUSED)
        stranger.drop(blob)
        assert isinstance(source.fetch(blob, timeout_s=WAIT_S), np.ndarray)


class _Silent(flight.ClientAuthHandler):  # type: ignore[misc]
    """Says what it is told to, and shows what it was answered."""

    def __init__(self, *messages: bytes) -> None:
        super().__init__()
        self.messages = messages
        self.heard: list[bytes] = []

    def authenticate(self, outgoing: Any, incoming: Any) -> None:
        for message in self.messages:
            outgoing.write(message)
            self.heard.append(incoming.read())

    def get_token(self) -> bytes:
        return b"no session"


@pytest.mark.parametrize(
    "messages",
    [(b"",), (b"x" * 32, b"y" * 32), (b"x" * 32, b""), (b"x" * 10_000,)],
    ids=["nothing", "a wrong proof", "no proof", "a long nonce"],
)
def test_wrong_handshake_is_refused(messages: tuple[bytes, ...], tmp_path: Path) -> None:
    with served(tmp_path / "a") as source:
        blob = offered(source)
        client = flight.FlightClient(source.address)
        with pytest.raises(flight.FlightUnauthenticatedError):
            client.authenticate(_Silent(*messages), flight.FlightCallOptions(timeout=WAIT_S))
            list(client.do_get(flight.Ticket(f"kv/{blob.sha256}".encode())))
        client.close()


def test_call_without_a_handshake_is_refused(tmp_path: Path) -> None:
    with served(tmp_path / "a") as source:
        blob = offered(source)
        client = flight.FlightClient(source.address)
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_get(flight.Ticket(f"kv/{blob.sha256}".encode())))
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(client.do_action(flight.Action("drop", f"kv/{blob.sha256}".encode())))
        client.close()
        assert isinstance(source.fetch(blob, timeout_s=WAIT_S), np.ndarray)


def test_token_never_travels_and_proofs_fit_one_connection(tmp_path: Path) -> None:
    with served(tmp_path / "a") as source:
        client = flight.FlightClient(source.address)
        auth = _Silent(b"n" * 32)
        with pytest.raises(flight.FlightUnauthenticatedError) as refused:
            client.authenticate(auth, flight.FlightCallOptions(timeout=WAIT_S))
        client.close()
        assert "Traceback" not in str(refused.value)
    answer = auth.heard[0]
    server = answer[:32]
    assert answer[32:] == flight_auth.proof(TOKEN, RUN, b"server", b"n" * 32, server)
    assert TOKEN not in answer
    proofs = {
        flight_auth.proof(token, run, who, client, server)
        for token in (TOKEN, TOKEN[1:])
        for run in (RUN, "other")
        for who in (b"server", b"client")
        for client, server in ((b"a" * 32, b"b" * 32), (b"b" * 32, b"a" * 32))
    }
    assert len(proofs) == 16


def test_peer_that_does_not_know_the_token_learns_no_proof(tmp_path: Path) -> None:
    """A client gives its own proof only to who has given one."""
    heard: list[bytes] = []

    class Impostor(flight.ServerAuthHandler):  # type: ignore[misc]
        def authenticate(self, outgoing: Any, incoming: Any) -> None:
            heard.append(incoming.read())
            outgoing.write(b"s" * 64)
            heard.append(incoming.read())

        def is_valid(self, token: bytes) -> bytes:
            return b"anyone"

    server = flight.FlightServerBase(f"grpc://{HOST}:0", auth_handler=Impostor())
    with served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=f"grpc://{HOST}:{server.port}")
        assert target.fetch(blob, timeout_s=WAIT_S) == Lost(port.REFUSED)
    server.shutdown()
    server.wait()
    assert len(heard[0]) == 32 and b"".join(heard[1:]) == b""


def test_oldest_session_is_forgotten_and_its_client_proves_itself_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_auth, "SESSIONS_MAX", 1)
    with (
        served(tmp_path / "a") as source,
        served(tmp_path / "b") as first,
        served(tmp_path / "c") as second,
    ):
        blob = offered(source)
        for target in (first, second, first, second):
            assert isinstance(target.fetch(blob, timeout_s=WAIT_S), np.ndarray)


# Peers that are not well


def test_dead_peer_is_named_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=nobody())
        began_s = time.monotonic()
        assert target.fetch(blob, timeout_s=WAIT_S) == Lost(port.UNREACHABLE)
        assert target.copy(blob.peer, NAME, io.BytesIO()) == Lost(port.UNREACHABLE)
        target.drop(blob)
        assert time.monotonic() - began_s < WAIT_S / 2


def test_mute_peer_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    with mute_peer() as peer, served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=peer)
        began_s = time.monotonic()
        found = target.fetch(blob, timeout_s=0.3)
        assert time.monotonic() - began_s < 2.0
        assert found in (Lost(port.LATE), Lost(port.UNREACHABLE))


@pytest.mark.parametrize(
    "peer",
    ["http://example.org:80", "grpc://host", "grpc://a b:1", "unix:/tmp/x", "x", "grpc://h:1/.."],
)
def test_address_that_is_none_is_not_called(peer: str, tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=peer)
        assert target.fetch(blob, timeout_s=WAIT_S) == Lost(port.UNREADABLE)
        target.drop(blob)


def test_peer_that_was_started_anew_is_known_again(tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        with served(tmp_path / "a") as source:
            blob = offered(source)
            assert isinstance(target.fetch(blob, timeout_s=WAIT_S), np.ndarray)
            number = int(source.address.rpartition(":")[2])
        assert target.fetch(blob, timeout_s=WAIT_S) == Lost(port.UNREACHABLE)
        with served(tmp_path / "a", port=number) as again:
            assert offered(again) == blob
            until_s = time.monotonic() + WAIT_S
            while isinstance(target.fetch(blob, timeout_s=WAIT_S), Lost):
                assert time.monotonic() < until_s, "gRPC's own patience with an address is 1 s"


def test_peer_that_ends_in_the_middle_is_named(tmp_path: Path) -> None:
    gate, first = threading.Event(), threading.Event()

    class Half(flight.FlightServerBase):  # type: ignore[misc]
        def do_get(self, context: Any, ticket: Any) -> Any:
            def chunks() -> Any:
                column = pa.array([1, 2, 3], pa.uint8())
                yield pa.RecordBatch.from_arrays([column], schema=flight_server.SCHEMA)
                first.set()
                gate.wait(WAIT_S)
                raise flight.FlightServerError("it ended")

            return flight.GeneratorStream(flight_server.SCHEMA, chunks())

    server = Half(f"grpc://{HOST}:0", auth_handler=flight_auth.ServerAuth(TOKEN, RUN))
    with served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=f"grpc://{HOST}:{server.port}")
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(target.fetch, blob, timeout_s=WAIT_S)
            assert first.wait(WAIT_S)
            gate.set()
            assert found.result() == Lost(port.BROKEN_OFF)
    server.shutdown()
    server.wait()


def test_stream_that_stalls_is_late_and_gives_its_seat_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = threading.Event()
    real = flight_server._Chunks.__next__

    def slow(self: Any) -> Any:
        if self._at and not stalled.is_set():
            stalled.wait(1.0)
        return real(self)

    monkeypatch.setattr(flight_server._Chunks, "__next__", slow)
    with served(tmp_path / "a", streams_max=1) as source, served(tmp_path / "b") as target:
        blob = offered(source)
        assert target.fetch(blob, timeout_s=0.3) == Lost(port.LATE)
        stalled.set()
        until_s = time.monotonic() + WAIT_S
        while isinstance(found := target.fetch(blob, timeout_s=WAIT_S), Lost):
            assert found.why == port.BUSY and time.monotonic() < until_s


def test_peer_that_serves_enough_already_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, gate = threading.Event(), threading.Event()
    real = flight_server._Chunks.__next__

    def slow(self: Any) -> Any:
        inside.set()
        gate.wait(WAIT_S)
        return real(self)

    monkeypatch.setattr(flight_server._Chunks, "__next__", slow)
    with served(tmp_path / "a", streams_max=1) as source, served(tmp_path / "b") as target:
        blob = offered(source)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(target.fetch, blob, timeout_s=WAIT_S)
            assert inside.wait(WAIT_S)
            with served(tmp_path / "c") as other:
                assert other.fetch(blob, timeout_s=WAIT_S) == Lost(port.BUSY)
            gate.set()
            assert isinstance(found.result(), np.ndarray)


def test_more_peers_than_connections_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_client, "PEERS_MAX", 1)
    with (
        served(tmp_path / "a") as first,
        served(tmp_path / "b") as second,
        served(tmp_path / "c") as target,
    ):
        blobs = [offered(first, b"1"), offered(second, b"2")]
        for blob in blobs * 2:
            assert isinstance(target.fetch(blob, timeout_s=WAIT_S), np.ndarray)


# When one ends


def test_peer_that_ends_waits_for_those_that_fetch_from_it(tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        source = served(tmp_path / "a", linger_s=WAIT_S)
        transfers = source.__enter__()
        blob = offered(transfers)
        with ThreadPoolExecutor(1) as pool:
            ending = pool.submit(source.__exit__, None, None, None)
            assert isinstance(target.fetch(blob, timeout_s=WAIT_S), np.ndarray)
            ending.result(WAIT_S)
    assert not list((tmp_path / "a" / "place").iterdir()), "what was sent needs nobody any more"


def test_peer_that_ends_does_not_wait_for_ever(tmp_path: Path) -> None:
    began_s = time.monotonic()
    with served(tmp_path / "a", linger_s=0.1) as source:
        offered(source)
    assert 0.1 <= time.monotonic() - began_s < 5.0
    assert list((tmp_path / "a" / "place").iterdir()), "one of this machine may yet take it"


def test_peer_whose_blobs_were_dropped_ends_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        with served(tmp_path / "a", linger_s=WAIT_S) as source:
            here, there = offered(source, b"here"), offered(source, b"there")
            source.drop(here)
            target.drop(there)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < 2.0


# Weights


def test_weights_are_copied_chunk_by_chunk(tmp_path: Path) -> None:
    put_weights(tmp_path / "a")
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target:
        copy = io.BytesIO()
        assert target.copy(source.address, NAME, copy) is None
        assert copy.getvalue() == DATA


def test_weights_that_a_peer_lacks_are_not_here(tmp_path: Path) -> None:
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target:
        assert target.copy(source.address, NAME, io.BytesIO()) == Lost(port.GONE)
        for name in ("weights/../place/x", "place/x", "weights/x", "kv/../../x", ""):
            assert target.copy(source.address, name, io.BytesIO()) == Lost(port.GONE)


def test_disk_that_is_full_is_named(tmp_path: Path) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError("no space left")

    put_weights(tmp_path / "a")
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target:
        assert target.copy(source.address, NAME, Full()) == Lost(port.NO_ROOM)


def test_only_blobs_can_be_dropped(tmp_path: Path) -> None:
    put_weights(tmp_path / "a")
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target:
        assert target._client.drop(source.address, NAME) is None
    assert (tmp_path / "a" / "policies" / NAME).exists()


def test_own_address_is_never_called(tmp_path: Path) -> None:
    with served(tmp_path / "a") as source:
        blob = msgspec.structs.replace(offered(source), sha256="a" * 64)
        assert source.fetch(blob, timeout_s=WAIT_S) == Lost(port.GONE)
        source.drop(blob)
        assert not source._client._open
