"""Tests that a store returns full weights of deltas too."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.store.arrow_files import open_files
from dora_pipe.store.copies import KEEP_S
from dora_pipe.store.files import Files, LocalFiles
from dora_pipe.store.names import delta_name, weights_name
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.verified import SUFFIX
from tests.support.stores import Walk, publish_walk
from tests.support.worker import VirtualClock


class Counted:
    def __init__(self, inner: Files) -> None:
        self._inner = inner
        self.read: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def get(self, name: str, target: Path) -> bool:
        self.read.append(name)
        return self._inner.get(name, target)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Counted]:
    yield Counted(open_files(f"file://{tmp_path}/shared/x"))


def machine(tmp_path: Path, name: str, files: Counted) -> PolicyStore:
    return PolicyStore(
        tmp_path / name,
        files,  # type: ignore[arg-type]
        clock=VirtualClock(),
        with_deltas=True,
    )


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_of_the_versions_between_whole_ones_only_deltas_lie_in_the_store(tmp_path: Path) -> None:
    store = PolicyStore(tmp_path)
    published = publish_walk(store, 6, full_every=4)
    assert [version.whole for version in published] == [True, False, False, False, True, False]
    assert [version.delta is not None for version in published] == [False, *[True] * 5]
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 2
    for version, entry in enumerate(published):
        digest = entry.manifest.digest
        assert store.has_weights(digest)
        assert store.verify(digest) == entry.manifest
        path = tmp_path / "expected"
        Walk(version)(path)
        assert store.weights(digest).read_bytes() == path.read_bytes()
        if entry.delta is not None and entry.change is not None:
            assert entry.delta.bytes < entry.manifest.bytes / 10
            assert 0 < entry.change.changed <= 40


def test_without_copies_the_same_files_are_made_again_of_the_deltas(tmp_path: Path) -> None:
    published = publish_walk(PolicyStore(tmp_path), 6, full_every=4)
    for copy in (tmp_path / "made").iterdir():
        copy.unlink()
    store = PolicyStore(tmp_path)
    for version in published:
        assert store.verify(version.manifest.digest) == version.manifest
    assert len(list((tmp_path / "made").glob("*.safetensors"))) == 4


def test_a_machine_that_has_the_version_before_fetches_the_delta_alone(
    tmp_path: Path, elsewhere: Counted
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 6, full_every=4)
    worker = machine(tmp_path, "m1", elsewhere)
    for version in published[:2]:
        worker.weights(version.manifest.digest)
    elsewhere.read.clear()
    digests = [version.manifest.digest for version in published]
    assert read_manifest(worker.weights(digests[3])) == published[3].manifest
    assert elsewhere.read == [delta_name(digests[3]), delta_name(digests[2])]
    elsewhere.read.clear()
    worker.weights(digests[4])  # full checkpoint there too
    assert elsewhere.read == [delta_name(digests[4])]


def test_a_machine_without_any_version_fetches_the_last_whole_one_and_the_deltas_after_it(
    tmp_path: Path, elsewhere: Counted
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 7, full_every=4)
    digests = [version.manifest.digest for version in published]
    worker = machine(tmp_path, "m1", elsewhere)
    assert worker.verify(digests[6]) == published[6].manifest
    assert elsewhere.read == [
        delta_name(digests[6]),
        delta_name(digests[5]),
        weights_name(digests[4]),
    ]
    assert machine(tmp_path, "m2", elsewhere).verify(digests[4]) == published[4].manifest


@pytest.mark.parametrize("how", ["lost", "damaged"])
def test_a_delta_that_cannot_be_used_is_named_and_the_whole_version_is_taken(
    tmp_path: Path, elsewhere: Counted, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 6, full_every=4)
    digests = [version.manifest.digest for version in published]
    for digest in (digests[3], digests[4]):
        path = tmp_path / "shared" / "x" / delta_name(digest)
        if how == "lost":
            path.unlink()
        else:
            flip(path)
    worker = machine(tmp_path, "m1", elsewhere)
    worker.weights(digests[2])
    with caplog.at_level(logging.WARNING):
        assert read_manifest(worker.weights(digests[4])) == published[4].manifest
    assert delta_name(digests[4]) in caplog.text
    with pytest.raises(PolicyError, match=f"no .*{digests[3][:12]}|{digests[3]}") as refused:
        worker.weights(digests[3])
    if how == "damaged":
        assert "dora-pipe export" in (refused.value.hint or "")
    assert worker.verify(digests[5]) == published[5].manifest


def test_a_copy_of_a_delta_that_was_damaged_is_fetched_again(
    tmp_path: Path, elsewhere: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    published = publish_walk(machine(tmp_path, "m0", elsewhere), 3, full_every=8)
    worker = machine(tmp_path, "m1", elsewhere)
    first, last = (published[position].manifest.digest for position in (1, 2))
    worker.weights(first)
    worker.weights_path(first).unlink()
    flip(tmp_path / "m1" / delta_name(first))
    elsewhere.read.clear()
    with caplog.at_level(logging.WARNING):
        assert worker.verify(last) == published[2].manifest
    assert sorted(elsewhere.read) == sorted([delta_name(first), delta_name(last)])
    assert "damaged on this machine" in caplog.text


def test_what_was_made_leaves_when_there_is_no_room_for_it_and_is_made_again(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    store = PolicyStore(tmp_path, cache_bytes_max=20_000, clock=clock)
    published = publish_walk(store, 4, full_every=8)
    old_ns = clock.wall_ns() - int((KEEP_S + 60) * 1e9)
    for copy in (tmp_path / "made").iterdir():
        os.utime(copy, ns=(old_ns, old_ns))
    held = store.held_weights(published[3].manifest.digest)
    store.publish_version(Walk(4), before=published[3].manifest.digest, whole=False)
    assert len(list((tmp_path / "made").glob("*.safetensors"))) == 2
    assert held.is_file()
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 1
    for version in published:
        assert store.verify(version.manifest.digest) == version.manifest


def test_deltas_never_go_in_a_circle(tmp_path: Path) -> None:
    store = PolicyStore(tmp_path)
    digests: list[str] = []
    for version in (0, 1, 2, 1, 2, 2):
        before = digests[-1] if digests else ""
        first_version = store.publish_version(Walk(version), before=before, whole=not digests)
        digests.append(first_version.manifest.digest)
    for folder, files in (("made", 2), ("deltas", 2), ("weights", 3)):
        paths = [path for path in (tmp_path / folder).iterdir() if path.suffix != SUFFIX]
        assert len(paths) == files, folder
    for copy in (tmp_path / "made").iterdir():
        copy.unlink()
    for digest in digests:
        assert store.verify(digest).digest == digest


def test_a_delta_under_another_name_is_refused(tmp_path: Path) -> None:
    store = PolicyStore(tmp_path)
    published = publish_walk(store, 3, full_every=4)
    files = LocalFiles(tmp_path)
    path, two = (files.root / delta_name(version.manifest.digest) for version in published[1:])
    two.write_bytes(path.read_bytes())
    for copy in (tmp_path / "made").iterdir():
        copy.unlink()
    with pytest.raises(PolicyError, match="produces another version"):
        store.weights(published[2].manifest.digest)
