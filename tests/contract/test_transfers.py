"""Tests of every transfer: whole files or a named loss, within a time limit."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dora_pipe.schemas.policy import Blob
from dora_pipe.store.transfers import transfers
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.transfers import AGE_MAX_NS, Lost
from tests.support.transfers import PAIRS, Pair

WAIT_S = 60.0
CHANCE = np.random.default_rng(1)
LARGE = CHANCE.integers(0, 256, 9 * 1024 * 1024 + 17, dtype=np.uint8).tobytes()
"""More than two chunks of a stream, and a bit."""


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    yield from PAIRS[request.param](tmp_path)


def offered(transfers: MappedFiles, *chunks: bytes) -> Blob:
    blob = transfers.offer([memoryview(chunk) for chunk in chunks])
    assert isinstance(blob, Blob), blob
    return blob


def fetched(transfers: MappedFiles, blob: Blob) -> bytes:
    fetch = transfers.fetch(blob, timeout_s=WAIT_S)
    assert isinstance(fetch, np.ndarray), fetch
    return fetch.tobytes()


@pytest.mark.parametrize("data", [b"x", b"12345678" * 3, LARGE], ids=["byte", "small", "large"])
def test_what_is_offered_is_fetched_whole_under_its_digest(pair: Pair, data: bytes) -> None:
    blob = offered(pair.source, data)
    assert (blob.sha256, blob.bytes) == (hashlib.sha256(data).hexdigest(), len(data))
    assert blob.peer == pair.source.address
    assert fetched(pair.target, blob) == data
    assert fetched(pair.source, blob) == data


def test_chunks_are_one_blob(pair: Pair) -> None:
    cut = len(LARGE) // 3
    blob = offered(pair.source, LARGE[:cut], b"", LARGE[cut:])
    assert blob == offered(pair.source, LARGE)
    assert fetched(pair.target, blob) == LARGE


def test_fetched_bytes_may_be_written_to_and_outlive_the_blob(pair: Pair) -> None:
    blob = offered(pair.source, LARGE)
    fetch = pair.target.fetch(blob, timeout_s=WAIT_S)
    assert isinstance(fetch, np.ndarray)
    pair.target.drop(blob)
    fetch[0] ^= 1
    assert fetch.tobytes()[1:] == LARGE[1:]
    assert pair.target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.GONE)


def test_target_that_drops_a_blob_frees_the_place_of_its_source(pair: Pair) -> None:
    blob = offered(pair.source, LARGE)
    assert pair.kept() == 1
    pair.target.drop(blob)
    pair.target.drop(blob)
    assert pair.kept() == 0


def test_other_bytes_are_named_and_never_given(pair: Pair) -> None:
    blob = offered(pair.source, LARGE)
    pair.damage(blob)
    assert pair.target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.OTHER_DIGEST)


@pytest.mark.parametrize("by", [-1, 1])
def test_other_size_is_named_and_never_given(pair: Pair, by: int) -> None:
    blob = offered(pair.source, LARGE)
    other = msgspec.structs.replace(blob, bytes=blob.bytes + by)
    assert pair.target.fetch(other, timeout_s=WAIT_S) == Lost(transfers.OTHER_DIGEST)


def test_blob_that_nobody_offered_is_not_here(pair: Pair) -> None:
    blob = Blob(sha256="a" * 64, bytes=5, peer=pair.source.address)
    assert pair.target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.GONE)
    pair.target.drop(blob)


def test_strange_names_and_sizes_lead_nowhere(pair: Pair, tmp_path: Path) -> None:
    victim = tmp_path / "victim.safetensors"
    victim.write_bytes(b"x")
    peer = pair.source.address
    for name in ("../victim", "../../victim", "a" * 63, "A" * 64, ""):
        blob = Blob(sha256=name, bytes=1, peer=peer)
        assert pair.target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.UNREADABLE)
        pair.target.drop(blob)
    for size in (0, -1, transfers.BLOB_BYTES_MAX + 1, 10**18):
        blob = Blob(sha256="a" * 64, bytes=size, peer=peer)
        assert pair.target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.TOO_LARGE)
    assert victim.exists()


def test_fetch_after_its_deadline_is_late(pair: Pair) -> None:
    blob = offered(pair.source, LARGE)
    began_s = time.monotonic()
    assert pair.target.fetch(blob, timeout_s=0.0) == Lost(transfers.LATE)
    assert time.monotonic() - began_s < WAIT_S / 2
    assert fetched(pair.target, blob) == LARGE


def test_clear_forgets_what_lies_in_the_place(pair: Pair) -> None:
    blob = offered(pair.source, LARGE)
    pair.source.clear()
    pair.source.clear()
    assert pair.kept() == 0
    assert pair.target.fetch(blob, timeout_s=WAIT_S) == Lost(transfers.GONE)


def test_many_at_once_do_not_mix(pair: Pair) -> None:
    datas = [bytes([n]) * (100_000 + n) for n in range(24)]
    with ThreadPoolExecutor(6) as pool:
        blobs = list(pool.map(lambda data: offered(pair.source, data), datas))
        result = list(pool.map(lambda blob: fetched(pair.target, blob), blobs))
        list(pool.map(pair.target.drop, blobs))
    assert result == datas
    assert pair.kept() == 0


@pytest.mark.parametrize("way", PAIRS)
def test_full_place_takes_nothing_until_forgotten_blobs_are_old(way: str, tmp_path: Path) -> None:
    for pair in PAIRS[way](tmp_path, bytes_max=1000):
        first = offered(pair.source, b"x" * 600)
        for path in tmp_path.rglob("*.safetensors"):
            os.utime(path, ns=(pair.clock.wall_ns(), pair.clock.wall_ns()))
        assert pair.source.offer([memoryview(b"y" * 401)]) == Lost(transfers.NO_ROOM)
        assert fetched(pair.target, first) == b"x" * 600
        pair.clock.ns += AGE_MAX_NS + 1
        second = offered(pair.source, b"y" * 401)
        assert pair.target.fetch(first, timeout_s=WAIT_S) == Lost(transfers.GONE)
        assert fetched(pair.target, second) == b"y" * 401


@pytest.mark.parametrize("way", PAIRS)
def test_blob_above_the_limit_is_not_taken(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.store.transfers.files.BLOB_BYTES_MAX", 10)
    for pair in PAIRS[way](tmp_path):
        assert pair.source.offer([memoryview(b"x" * 6), memoryview(b"y" * 5)]) == Lost(
            transfers.TOO_LARGE
        )
        assert pair.kept() == 0
