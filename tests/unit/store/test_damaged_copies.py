"""Tests of damaged copies of versions: detected, replaced, reported."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.store.delta import opened_deltas, write_from_deltas
from dora_pipe.store.files import Files
from dora_pipe.store.names import delta_name, weights_name
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import FETCHES_MAX, PolicyStore, PublishedVersion
from dora_pipe.store.verified import note_path
from tests.support.stores import Walk, publish_walk
from tests.unit.store.test_store_deltas import Counted, elsewhere, flip, machine

__all__ = ["elsewhere"]


def rot(path: Path) -> None:
    status = path.stat()
    flip(path)
    old_ns = status.st_mtime_ns - 10**10
    os.utime(path, ns=(status.st_atime_ns, old_ns))
    note = note_path(path)
    if note.is_file():
        text = f'"mtime_ns":{status.st_mtime_ns}'.encode()
        assert text in note.read_bytes()
        note.write_bytes(note.read_bytes().replace(text, f'"mtime_ns":{old_ns}'.encode()))


def digests_of(published: list[PublishedVersion]) -> list[str]:
    return [version.manifest.digest for version in published]


@pytest.mark.parametrize("full_every", [1, 8])
def test_a_damaged_copy_on_a_machine_is_named_and_had_again(
    tmp_path: Path, elsewhere: Counted, full_every: int, caplog: pytest.LogCaptureFixture
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 3, full_every=full_every)
    worker = machine(tmp_path, "m1", elsewhere)
    digest = published[2].manifest.digest
    path = worker.weights(digest)
    flip(path)
    with caplog.at_level(logging.WARNING):
        assert read_manifest(worker.weights(digest)) == published[2].manifest
    assert f"{path} was damaged on this machine" in caplog.text


class Wire:
    def __init__(self, inner: Files, damaged: int) -> None:
        self._inner = inner
        self.damaged = damaged

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get(self, name: str, target: Path) -> bool:
        result = self._inner.get(name, target)
        self.damaged -= 1
        if self.damaged >= 0:
            flip(target)
        return result


def test_what_arrives_damaged_is_fetched_again_so_many_times_and_no_more(
    tmp_path: Path, elsewhere: Counted
) -> None:
    digest = publish_walk(machine(tmp_path, "m0", elsewhere), 1, full_every=1)[0].manifest.digest
    for damaged in (FETCHES_MAX - 1, 100):
        wire = Wire(elsewhere, damaged)  # type: ignore[arg-type]
        worker = PolicyStore(tmp_path / f"w{damaged}", wire)  # type: ignore[arg-type]
        elsewhere.read.clear()
        if damaged < FETCHES_MAX:
            assert read_manifest(worker.weights(digest)).digest == digest
        else:
            with pytest.raises(PolicyError, match=f"{weights_name(digest)} in .*/shared/x "):
                worker.weights(digest)
        assert elsewhere.read == [weights_name(digest)] * FETCHES_MAX


def test_a_damaged_file_of_the_store_is_named_with_its_place_and_what_makes_it_again(
    tmp_path: Path, elsewhere: Counted
) -> None:
    digest = publish_walk(machine(tmp_path, "m0", elsewhere), 1, full_every=1)[0].manifest.digest
    flip(tmp_path / "shared" / "x" / weights_name(digest))
    local = PolicyStore(tmp_path / "shared" / "x")
    for store in (machine(tmp_path, "m1", elsewhere), local):
        with pytest.raises(PolicyError, match=digest) as refused:
            store.weights(digest)
        assert "shared/x" in refused.value.message
        assert "dora-pipe export policy RUN N" in (refused.value.hint or "")
        assert refused.value.exit_code == 9
    assert read_manifest(local.weights_path(digest)).digest != digest, "nobody deletes it"


@pytest.mark.parametrize("damage", [flip, rot])
def test_a_damaged_version_is_no_base_of_a_delta_that_is_applied(
    tmp_path: Path, elsewhere: Counted, damage: Callable[[Path], None]
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 3, full_every=8)
    worker = machine(tmp_path, "m1", elsewhere)
    base, digest = digests_of(published)[1:]
    worker.verify(base)
    damage(worker.weights(base))
    assert read_manifest(worker.weights(digest)) == published[2].manifest
    assert read_manifest(worker.weights(base)) == published[1].manifest


@pytest.mark.parametrize("damage", [flip, rot])
@pytest.mark.parametrize("full", [False, True])
def test_a_damaged_version_is_no_base_of_a_delta_that_is_written(
    tmp_path: Path, damage: Callable[[Path], None], full: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = PolicyStore(tmp_path)
    published = publish_walk(store, 1 if full else 3, full_every=8)
    before = published[-1].manifest.digest
    sound = store.weights(before).read_bytes()
    damage(store.weights(before))
    with caplog.at_level(logging.WARNING):
        version = store.publish_version(Walk(3), before=before, whole=False)
    if full:
        assert version.whole, "there is no other file to make it of"
        assert before in caplog.text
        return
    assert not version.whole
    (tmp_path / "sound").write_bytes(sound)
    with opened_deltas([tmp_path / delta_name(version.manifest.digest)]) as deltas:
        assert (
            write_from_deltas(tmp_path / "made.st", tmp_path / "sound", deltas) == version.manifest
        )


def test_damaged_copies_of_optimizer_states_and_of_tokenizers_are_fetched_again(
    tmp_path: Path, elsewhere: Counted
) -> None:
    trainer, worker = machine(tmp_path, "m0", elsewhere), machine(tmp_path, "m1", elsewhere)

    def state(path: Path) -> None:
        path.write_bytes(b"state" * 9)

    blob = trainer.publish_blob("optimizer", state)
    config = tmp_path / "config.json"
    config.write_text('{"a": 1}')
    assets = trainer.publish_assets([config])
    flip(worker.blob("optimizer", blob.sha256))
    assert worker.verify_blob("optimizer", blob.sha256).read_bytes() == b"state" * 9
    flip(worker.assets(assets) / "config.json")
    assert (worker.assets(assets) / "config.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize("full_every", [1, 8])
def test_a_damaged_file_of_a_store_elsewhere_is_mended_by_who_has_the_version(
    tmp_path: Path, elsewhere: Counted, full_every: int
) -> None:
    trainer = machine(tmp_path, "m0", elsewhere)
    digest = publish_walk(trainer, 2, full_every=full_every)[1].manifest.digest
    assert not trainer.mend(digest)
    name = weights_name(digest) if full_every == 1 else delta_name(digest)
    flip(tmp_path / "shared" / "x" / name)
    assert trainer.mend(digest)
    assert not trainer.mend(digest)
    assert machine(tmp_path, "m1", elsewhere).verify(digest).digest == digest
