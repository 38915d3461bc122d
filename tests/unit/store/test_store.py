"""Tests that store files appear atomically under their digest."""

import errno
import hashlib
import os
import struct
from pathlib import Path

import pytest

from dora_pipe.core.errors import PolicyError, ResourceError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store.names import assets_digest
from dora_pipe.store.safetensors_file import TensorSource, write_tensors
from dora_pipe.store.store import PolicyStore


class Writer:
    def __init__(self, value: float) -> None:
        self.data = struct.pack("<f", value)

    def __call__(self, path: Path) -> Manifest:
        return write_tensors(
            path, [TensorSource(name="x", dtype="F32", shape=(1,), data=lambda: self.data)]
        )


@pytest.fixture
def store(tmp_path: Path) -> PolicyStore:
    return PolicyStore(tmp_path / "policies")


def everything(store: PolicyStore) -> list[str]:
    return sorted(
        str(path.relative_to(store.root)) for path in store.root.rglob("*") if path.is_file()
    )


def test_blob_is_named_by_the_sha256_of_its_file(store: PolicyStore) -> None:
    blob = store.publish_blob("contributions", lambda path: _write(path, b"rows"))
    assert blob.sha256 == hashlib.sha256(b"rows").hexdigest()
    assert blob.bytes == 4
    assert store.blob("contributions", blob.sha256).read_bytes() == b"rows"
    assert store.verify_blob("contributions", blob.sha256).name.endswith(".arrow")
    store.blob("contributions", blob.sha256).write_bytes(b"rowz")
    with pytest.raises(PolicyError, match="was changed"):
        store.verify_blob("contributions", blob.sha256)
    with pytest.raises(PolicyError, match="no optimizer file"):
        store.verify_blob("optimizer", blob.sha256)


def test_full_disk_leaves_nothing_half_written(store: PolicyStore) -> None:
    def write(path: Path) -> None:
        _write(path, b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(ResourceError, match="no space left") as caught:
        store.publish_blob("optimizer", write)
    assert caught.value.hint is not None
    assert everything(store) == []


def test_file_is_synced_before_it_gets_its_name_and_its_folder_after(
    store: PolicyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    observed: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        name = Path(f"/proc/self/fd/{handle}").readlink()
        observed.append(("folder" if name.is_dir() else "file", bool(everything_named(store))))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    store.publish_weights(Writer(1.0))
    assert observed == [("file", False), ("folder", True)]


def everything_named(store: PolicyStore) -> list[str]:
    return [name for name in everything(store) if "/.tmp-" not in name]


def test_orphans_are_what_no_commit_names(store: PolicyStore, tmp_path: Path) -> None:
    named = store.publish_weights(Writer(1.0)).digest
    orphan = store.publish_weights(Writer(2.0)).digest
    blob = store.publish_blob("optimizer", lambda path: _write(path, b"state"))
    config = tmp_path / "config.json"
    config.write_text("{}")
    assets = store.publish_assets([config])
    unfinished = store.root / "weights" / ".tmp-1-0"
    unfinished.write_bytes(b"half")

    def orphans(*digests: str) -> list[Path]:
        return [store.root / orphan.name for orphan in store.orphans(digests)]

    assert orphans(named, blob.sha256, assets) == [unfinished, store.weights_path(orphan)]
    assert orphans(named, orphan) == [
        store.assets_path(assets) / "config.json",
        store.blob("optimizer", blob.sha256),
        unfinished,
    ]


def test_assets_digest_depends_on_names_and_bytes_not_on_order(tmp_path: Path) -> None:
    path, two = tmp_path / "config.json", tmp_path / "tokenizer.json"
    path.write_text("1")
    two.write_text("2")
    digest = assets_digest([path, two])
    assert assets_digest([two, path]) == digest
    two.write_text("3")
    assert assets_digest([path, two]) != digest


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
