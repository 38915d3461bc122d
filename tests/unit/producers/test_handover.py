"""Tests that defective KV caches are rejected with a reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from dora_pipe.producers.engines.engine import Array, Kv
from dora_pipe.producers.worker import kv_handover as handover_kv
from dora_pipe.producers.worker.kv_handover import (
    OTHER_REQUEST,
    Handover,
    KvHandover,
    KvLabel,
    MemoryHandover,
    label_of,
)
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.store.transfers.files import MappedFiles
from dora_pipe.store.transfers.transfers import (
    GONE,
    NO_ROOM,
    OTHER_DIGEST,
    UNREADABLE,
    Lost,
)
from tests.support.worker import VirtualClock

LABEL = label_of("g0000000001-000", [5, 6, 7, 8])
ARRAY = np.arange(2 * 2 * 3 * 3 * 4, dtype=np.float32).reshape(2, 2, 3, 3, 4)
KV = Kv(tokens=3, layout="torch-1 llama", weights="b" * 64, array=ARRAY)


@pytest.fixture
def files(tmp_path: Path) -> KvHandover:
    return KvHandover(MappedFiles(tmp_path / "handover", clock=VirtualClock()))


def put(handover: Handover, kv: Kv = KV, label: KvLabel = LABEL) -> Blob:
    blob = handover.put(label, kv)
    assert isinstance(blob, Blob)
    return blob


def path_of(tmp_path: Path, blob: Blob) -> Path:
    return tmp_path / "handover" / f"{blob.sha256}.safetensors"


def test_label_covers_all_tokens_but_the_last() -> None:
    assert label_of("t", [5, 6, 7, 9]) == label_of("t", [5, 6, 7, 8])
    assert label_of("t", [5, 6, 9, 8]) != label_of("t", [5, 6, 7, 8])
    assert label_of("t", [5, 6, 7]) != label_of("t", [5, 6, 7, 8])


@pytest.mark.parametrize("make", [MemoryHandover, None])
def test_what_is_put_is_fetched_until_it_is_dropped(
    make: type[MemoryHandover] | None, files: KvHandover
) -> None:
    handover: Handover = make() if make else files
    blob = put(handover)
    fetch = handover.fetch(LABEL, blob)
    assert isinstance(fetch, Kv) and fetch == KV
    assert fetch.array.tobytes() == ARRAY.tobytes()
    assert fetch.array.shape == ARRAY.shape and fetch.array.dtype == np.float32
    other = replace(LABEL, trajectory="g0000000001-001")
    assert handover.fetch(other, blob) == Lost(OTHER_REQUEST)
    handover.drop(blob)
    handover.drop(blob)
    assert handover.fetch(LABEL, blob) == Lost(GONE)
    put(handover)
    handover.clear()
    handover.clear()
    assert handover.fetch(LABEL, blob) == Lost(GONE)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": _flip,
    "a torn write": lambda path: os.truncate(path, 100),
    "nothing in it": lambda path: path.write_bytes(b""),
    "something behind it": lambda path: path.write_bytes(path.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_lost_and_deleted(damage: str, files: KvHandover, tmp_path: Path) -> None:
    blob = put(files)
    DAMAGE[damage](path_of(tmp_path, blob))
    assert files.fetch(LABEL, blob) == Lost(OTHER_DIGEST)
    assert not path_of(tmp_path, blob).exists()


GOOD = {
    "trajectory": LABEL.trajectory,
    "prefix": LABEL.prefix,
    "weights": "b" * 64,
    "layout": "x",
    "tokens": 3,
}


def saved(array: Array = ARRAY, **changes: object) -> bytes:
    text = json.dumps({**GOOD, **changes})
    return bytes(save({"kv": array}, {handover_kv.METADATA: text}))


STRANGE: dict[str, tuple[bytes, str]] = {
    "no safetensors": (b"hello, this is no tensor", UNREADABLE),
    "no metadata": (save({"kv": ARRAY}), UNREADABLE),
    "other metadata": (save({"kv": ARRAY}, {"format": "pt"}), UNREADABLE),
    "no number of tokens": (saved(tokens="three"), UNREADABLE),
    "a negative number": (saved(tokens=-3), UNREADABLE),
    "a huge number": (saved(tokens=10**20), UNREADABLE),
    "another request": (saved(prefix="0"), OTHER_REQUEST),
    "another type": (saved(ARRAY.astype(np.int16)), UNREADABLE),
    "no array": (save({}, {handover_kv.METADATA: json.dumps(GOOD)}), UNREADABLE),
}


def test_file_made_by_hand_is_taken(files: KvHandover, tmp_path: Path) -> None:
    put(files)
    blob = Blob(sha256=sha256_hex(saved()), bytes=len(saved()))
    path_of(tmp_path, blob).write_bytes(saved())
    assert isinstance(files.fetch(LABEL, blob), Kv)


@pytest.mark.parametrize("case", STRANGE)
def test_strange_file_under_its_own_digest_is_lost(
    case: str, files: KvHandover, tmp_path: Path
) -> None:
    data, why = STRANGE[case]
    put(files)
    blob = Blob(sha256=sha256_hex(data), bytes=len(data))
    path_of(tmp_path, blob).write_bytes(data)
    assert files.fetch(LABEL, blob) == Lost(why)


def test_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    files = KvHandover(MappedFiles(tmp_path / "file", clock=VirtualClock()))
    assert files.put(LABEL, KV) == Lost(NO_ROOM)
    assert isinstance(files.fetch(LABEL, Blob(sha256="a" * 64, bytes=5)), Lost)
    files.clear()
