"""Tests that weights are verified once per machine, and after changes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.store import verified
from dora_pipe.store.arrow_files import open_files
from dora_pipe.store.names import delta_name
from dora_pipe.store.safetensors_file import TensorSource, read_manifest, write_tensors
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.verified import need_digest, note_path
from tests.support.worker import VirtualClock


def write(path: Path, value: float = 1.0) -> Manifest:
    data = np.full(4, value, "<f4").tobytes()
    return write_tensors(path, [TensorSource(name="x", dtype="F32", shape=(4,), data=lambda: data)])


def older(path: Path, seconds: float = 10.0) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - int(seconds * 1e9)))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    paths: list[Path] = []

    def counted(path: Path) -> Manifest:
        paths.append(path)
        return read_manifest(path)

    monkeypatch.setattr(verified, "read_manifest", counted)
    return paths


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "weights.safetensors"
    digest = write(path).digest
    older(path)
    return path, digest


def test_second_process_takes_the_word_of_the_first(
    file: tuple[Path, str], reads: list[Path]
) -> None:
    path, digest = file
    need_digest(path, digest)
    need_digest(path, digest)
    assert reads == [path]


def rewritten(path: Path) -> None:
    write(path, 2.0)


def longer(path: Path) -> None:
    times = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(times, times))


def replaced(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    other.replace(path)


def noted_by_another_machine(path: Path) -> None:
    note = note_path(path)
    note.write_bytes(note.read_bytes().replace(b'"host":"', b'"host":"other'))


def note_cut_short(path: Path) -> None:
    note = note_path(path)
    note.write_bytes(note.read_bytes()[:-1])


def note_as_old_as_the_file(path: Path) -> None:
    status = path.stat()
    os.utime(note_path(path), ns=(status.st_mtime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        rewritten,
        longer,
        replaced,
        noted_by_another_machine,
        note_cut_short,
        note_as_old_as_the_file,
    ],
)
def test_file_is_read_again_after(
    file: tuple[Path, str], reads: list[Path], change: Callable[[Path], None]
) -> None:
    path, digest = file
    need_digest(path, digest)
    change(path)
    if change in (rewritten, longer):
        with pytest.raises(PolicyError):
            need_digest(path, digest)
    else:
        need_digest(path, digest)
    assert reads == [path, path]


def test_file_that_was_just_written_is_not_believed_by_its_note(
    tmp_path: Path, reads: list[Path]
) -> None:
    path = tmp_path / "weights.safetensors"
    digest = write(path).digest
    later = path.stat().st_mtime_ns + 10**12
    os.utime(path, ns=(later, later))
    need_digest(path, digest)
    need_digest(path, digest)
    assert reads == [path, path]


def test_of_two_at_once_one_reads(
    file: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, reads: list[Path]
) -> None:
    path, digest = file
    began, may_end = threading.Event(), threading.Event()

    def slow(path: Path) -> Manifest:
        began.set()
        assert may_end.wait(10)
        reads.append(path)
        return read_manifest(path)

    monkeypatch.setattr(verified, "read_manifest", slow)
    threads = [threading.Thread(target=need_digest, args=(path, digest)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert began.wait(10)
    may_end.set()
    for thread in threads:
        thread.join(10)
    assert reads == [path]


def test_copy_of_a_remote_store_is_compared_when_it_comes_and_its_use_changes_nothing(
    tmp_path: Path, reads: list[Path]
) -> None:
    (tmp_path / "shared").mkdir()
    files, clock = open_files((tmp_path / "shared").as_uri(), folder="r"), VirtualClock()
    digest = PolicyStore(tmp_path / "a", files, clock=clock).publish_weights(write).digest
    store = PolicyStore(tmp_path / "b", files, clock=clock)
    path = store.weights(digest)
    assert note_path(path).exists()
    clock.sleep(100)
    assert store.weights(digest) == path
    need_digest(path, digest)
    assert reads == []
    store.drop_weights(digest)
    assert list(path.parent.iterdir()) == []


def worker_of_two_versions(
    tmp_path: Path, *, full: bool, with_deltas: bool | None
) -> tuple[PolicyStore, str]:
    (tmp_path / "shared").mkdir()
    files, clock = open_files((tmp_path / "shared").as_uri(), folder="r"), VirtualClock()
    trainer = PolicyStore(tmp_path / "a", files, clock=clock)
    before = trainer.publish_weights(write).digest
    after = trainer.publish_version(
        lambda path: write(path, 1.5), before=before, whole=full
    ).manifest.digest
    worker = PolicyStore(tmp_path / "b", files, clock=clock, with_deltas=with_deltas)
    worker.weights(before)
    return worker, after


def test_version_that_deltas_made_is_not_read_again(tmp_path: Path, reads: list[Path]) -> None:
    worker, after = worker_of_two_versions(tmp_path, full=False, with_deltas=True)
    del reads[:]
    path = worker.weights(after)
    assert worker.weights(after) == path
    need_digest(path, after)
    assert reads == []
    path.write_bytes(path.read_bytes())
    need_digest(path, after)
    assert reads == [path], "what changes later is read"


def test_store_that_is_not_told_takes_the_delta_of_a_version_that_has_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker, after = worker_of_two_versions(tmp_path, full=True, with_deltas=None)
    worker.weights(after)
    assert (tmp_path / "b" / delta_name(after)).is_file()
    assert not caplog.records, "that a version has no delta is no news"
