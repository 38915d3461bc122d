"""Weights to many workers: peers spare the store, and everybody has the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench.moves_weights import Metered, bench_weights
from dora_pipe.store.files import LocalFiles


def test_store_is_read_by_everybody_or_by_nobody(tmp_path: Path) -> None:
    by_store, by_peers = bench_weights(tmp_path, [2], store_mb_s=[0], megabytes=1, hashers=[1])
    assert (by_store.way, by_peers.way) == ("store", "peers")
    assert by_store.megabytes == by_peers.megabytes == 1.0
    assert (by_store.store_mb, by_peers.store_mb) == (2.0, 0.0)
    for one in (by_store, by_peers):
        assert one.workers == 2
        assert 0 < one.median_s <= one.last_s < one.total_s
    weights = {
        path.read_bytes() for path in tmp_path.glob("*/weights/*.safetensors") if path.is_file()
    }
    assert len(weights) == 1
    assert len(list(tmp_path.glob("*-2-0-*/weights/*.safetensors"))) == 4


def test_modelled_store_is_as_slow_as_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("dora_pipe.bench.moves_weights.time.sleep", slept.append)
    monkeypatch.setattr("dora_pipe.bench.moves_weights.time.monotonic", lambda: 100.0)
    files = LocalFiles(tmp_path / "store")
    (tmp_path / "source").write_bytes(b"x" * 2_000_000)
    store = Metered(files, mb_s=4.0)
    (tmp_path / "store").mkdir()
    store.put(tmp_path / "source", "weights/x")
    assert store.get("weights/x", tmp_path / "copy")
    assert not store.get("weights/y", tmp_path / "copy")
    assert slept[0] == pytest.approx(0.5)
    assert store.bytes == 2_000_000
    assert store.exists("weights/x") and [one.name for one in store.listed("weights")]
    assert store.delete("weights/x")
