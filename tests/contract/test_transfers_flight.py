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
from dora_pipe.store.transfers import flight as ours
from dora_pipe.store.transfers import transfers
from dora_pipe.store.transfers.flight import FlightTransfers
from dora_pipe.store.transfers.transfers import Lost
from tests.support.transfers import HOST, RUN, TOKEN, mute_peer, nobody, served

WAIT_S = 60.0
DATA = np.arange(3 * 1024 * 1024, dtype=np.uint32).tobytes()
"""Three chunks of a stream."""
NAME = "weights/" + "d" * 64 + ".safetensors"


def offered(transfers: FlightTransfers, data: bytes = DATA) -> Blob:
    blob = transfers.offer([memoryview(data)])
    assert isinstance(blob, Blob)
    return blob


def put_weights(folder: Path, data: bytes = DATA) -> None:
    path = folder / "policies" / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# Peers that are not well


def test_dead_peer_is_named_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=nobody())
        began_s = time.monotonic()
        assert target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.UNREACHABLE)
        assert target.copy(blob.peer, NAME, io.BytesIO()) == Lost(transfers.UNREACHABLE)
        target.drop(blob)
        assert time.monotonic() - began_s < WAIT_S / 2


def test_mute_peer_costs_no_more_than_the_deadline(tmp_path: Path) -> None:
    with mute_peer() as peer, served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=peer)
        began_s = time.monotonic()
        fetch = target.fetch(blob, timeout_s=0.3)
        assert time.monotonic() - began_s < WAIT_S / 2
        assert fetch in (Lost(transfers.LATE), Lost(transfers.UNREACHABLE))


@pytest.mark.parametrize(
    "peer",
    ["http://example.org:80", "grpc://host", "grpc://a b:1", "unix:/tmp/x", "x", "grpc://h:1/.."],
)
def test_address_that_is_none_is_not_called(peer: str, tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=peer)
        assert target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.UNREADABLE)
        target.drop(blob)


def test_peer_that_was_started_anew_is_known_again(tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        with served(tmp_path / "a") as source:
            blob = offered(source)
            assert isinstance(target.fetch(blob, timeout_s=WAIT_S), np.ndarray)
            number = int(source.address.rpartition(":")[2])
        assert target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.UNREACHABLE)
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
                yield pa.RecordBatch.from_arrays([column], schema=ours.SCHEMA)
                first.set()
                gate.wait(WAIT_S)
                raise flight.FlightServerError("it ended")

            return flight.GeneratorStream(ours.SCHEMA, chunks())

        def do_action(self, context: Any, action: Any) -> Any:
            return iter([gatekeeper.hello(action.body.to_pybytes())])

    gatekeeper = ours.Gate(TOKEN, RUN)
    server = Half(f"grpc://{HOST}:0", middleware={ours.GATE: gatekeeper})
    with served(tmp_path / "b") as target:
        blob = Blob(sha256="a" * 64, bytes=5, peer=f"grpc://{HOST}:{server.port}")
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(target.fetch, blob, timeout_s=WAIT_S)
            assert first.wait(WAIT_S)
            gate.set()
            assert result.result() == Lost(transfers.BROKEN_OFF)
    server.shutdown()
    server.wait()


def test_stream_that_stalls_is_late_and_gives_its_seat_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stalled = threading.Event()
    sent: list[int] = []
    real = ours._batch

    def slow(piece: Any) -> Any:
        if sent and not stalled.is_set():
            stalled.wait(1.0)
        sent.append(1)
        return real(piece)

    monkeypatch.setattr(ours, "_batch", slow)
    with served(tmp_path / "a", streams_max=1) as source, served(tmp_path / "b") as target:
        blob = offered(source)
        assert target.fetch(blob, timeout_s=0.3) == Lost(transfers.LATE)
        stalled.set()
        until_s = time.monotonic() + WAIT_S
        while isinstance(fetch := target.fetch(blob, timeout_s=WAIT_S), Lost):
            assert fetch.why == transfers.BUSY and time.monotonic() < until_s


def test_peer_that_serves_enough_already_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, gate = threading.Event(), threading.Event()
    real = ours._batch

    def slow(piece: Any) -> Any:
        inside.set()
        gate.wait(WAIT_S)
        return real(piece)

    monkeypatch.setattr(ours, "_batch", slow)
    with served(tmp_path / "a", streams_max=1) as source, served(tmp_path / "b") as target:
        blob = offered(source)
        with ThreadPoolExecutor(1) as pool:
            result = pool.submit(target.fetch, blob, timeout_s=WAIT_S)
            assert inside.wait(WAIT_S)
            with served(tmp_path / "c") as other:
                assert other.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.BUSY)
            gate.set()
            assert isinstance(result.result(), np.ndarray)


def test_more_peers_than_connections_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "PEERS_MAX", 1)
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
    assert 0.1 <= time.monotonic() - began_s < WAIT_S
    assert list((tmp_path / "a" / "place").iterdir()), "one of this machine may yet take it"


def test_peer_whose_blobs_were_dropped_ends_at_once(tmp_path: Path) -> None:
    with served(tmp_path / "b") as target:
        with served(tmp_path / "a", linger_s=WAIT_S) as source:
            here, there = offered(source, b"here"), offered(source, b"there")
            source.drop(here)
            target.drop(there)
            began_s = time.monotonic()
        assert time.monotonic() - began_s < WAIT_S / 2


# Weights


def test_weights_are_copied_chunk_by_chunk(tmp_path: Path) -> None:
    put_weights(tmp_path / "a")
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target:
        copy = io.BytesIO()
        assert target.copy(source.address, NAME, copy) is None
        assert copy.getvalue() == DATA


def test_weights_that_a_peer_lacks_are_not_here(tmp_path: Path) -> None:
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target:
        assert target.copy(source.address, NAME, io.BytesIO()) == Lost(transfers.GONE)
        for name in ("weights/../place/x", "place/x", "weights/x", "kv/../../x", ""):
            assert target.copy(source.address, name, io.BytesIO()) == Lost(transfers.GONE)


def test_disk_that_is_full_is_named(tmp_path: Path) -> None:
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError("no space left")

    put_weights(tmp_path / "a")
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target:
        assert target.copy(source.address, NAME, Full()) == Lost(transfers.NO_ROOM)


def test_only_blobs_can_be_dropped(tmp_path: Path) -> None:
    put_weights(tmp_path / "a")
    with served(tmp_path / "a") as source, served(tmp_path / "b") as target:
        assert target._client.drop(source.address, NAME) is None
    assert (tmp_path / "a" / "policies" / NAME).exists()


def test_own_address_is_never_called(tmp_path: Path) -> None:
    with served(tmp_path / "a") as source:
        blob = msgspec.structs.replace(offered(source), sha256="a" * 64)
        assert source.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.GONE)
        source.drop(blob)
        assert not source._client._open
