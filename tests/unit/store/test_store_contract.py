"""Contract tests of policy stores: directory, `file://`, mock, S3."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from dora_pipe.core.errors import ConfigError, PolicyError, ResourceError
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.store.arrow_files import PAUSES_S, ArrowFiles, open_files
from dora_pipe.store.copies import KEEP_S, shrink
from dora_pipe.store.files import Files, LocalFiles
from dora_pipe.store.names import blob_name, digest_in, weights_name
from dora_pipe.store.store import PolicyStore
from tests.support.cluster import make_config
from tests.support.stores import HeldBack, Writer, assets_in, s3_files
from tests.support.worker import VirtualClock

PLACES = ("directory", "file", "mock", "subtree", "s3")


@dataclass
class Place:
    files: Files
    remote: bool
    root: Path

    def store(self, machine: str = "m0") -> PolicyStore:
        if not self.remote:
            return PolicyStore(self.root / "policies")
        return PolicyStore(self.root / machine, self.files, clock=VirtualClock())


@pytest.fixture(params=PLACES)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    if kind == "directory":
        yield Place(LocalFiles(tmp_path / "policies"), False, tmp_path)
    elif kind == "file":
        yield Place(open_files(f"file://{tmp_path}/shared/x"), True, tmp_path)
    elif kind == "mock":
        mock = fs._MockFileSystem(datetime.datetime.now(tz=datetime.UTC))
        yield Place(ArrowFiles(mock, "bucket/run"), True, tmp_path)
    elif kind == "subtree":
        mock = fs._MockFileSystem(datetime.datetime.now(tz=datetime.UTC))
        mock.create_dir("bucket/run")
        sub = fs.SubTreeFileSystem("bucket/run", mock)
        yield Place(ArrowFiles(sub, ""), True, tmp_path)
    else:
        yield Place(s3_files(request), True, tmp_path)


def test_what_one_machine_publishes_another_reads_and_verifies(directory: Place) -> None:
    here, there = directory.store("m0"), directory.store("m1")
    manifest = here.publish_weights(Writer(1.0))
    assert there.has_weights(manifest.digest)
    assert there.verify(manifest.digest) == manifest
    assert there.weights(manifest.digest).is_file()
    assert there.held_weights(manifest.digest).is_file()


def test_blobs_and_assets_travel_too(directory: Place) -> None:
    here, there = directory.store("m0"), directory.store("m1")
    blob = here.publish_blob("optimizer", lambda path: _write(path, b"state"))
    assets = here.publish_assets(assets_in(directory.root / "model"))
    assert there.has_blob("optimizer", blob.sha256)
    assert there.verify_blob("optimizer", blob.sha256).read_bytes() == b"state"
    names = sorted(path.name for path in there.assets(assets).iterdir())
    assert names == ["config.json", "tokenizer.json"]
    assert here.publish_assets(assets_in(directory.root / "model")) == assets


def test_what_is_nowhere_is_named(directory: Place) -> None:
    store = directory.store()
    assert not store.has_weights("0" * 64)
    with pytest.raises(PolicyError, match="no weights"):
        store.verify("0" * 64)
    with pytest.raises(PolicyError, match="no "):
        store.verify_blob("contributions", "0" * 64)


def test_publishing_again_is_harmless_and_mends_what_was_damaged(directory: Place) -> None:
    store = directory.store()
    manifest = store.publish_weights(Writer(1.0))
    damaged = directory.root / "damaged"
    damaged.write_bytes(b"not weights")
    directory.files.put(damaged, weights_name(manifest.digest))
    with pytest.raises(PolicyError):
        directory.store("m2").verify(manifest.digest)
    store.publish_weights(Writer(1.0))
    assert directory.store("m3").verify(manifest.digest) == manifest


def test_everything_is_listed_by_name_and_size_and_orphans_are_the_rest(directory: Place) -> None:
    store = directory.store()
    manifest = store.publish_weights(Writer(1.0))
    other = store.publish_weights(Writer(2.0))
    blob = store.publish_blob("contributions", lambda path: _write(path, b"rows"))
    listed = {file.name: file.bytes for file in store.everything()}
    assert set(listed) == {
        weights_name(manifest.digest),
        weights_name(other.digest),
        blob_name("contributions", blob.sha256),
    }
    assert listed[blob_name("contributions", blob.sha256)] == 4
    orphans = store.orphans({manifest.digest, blob.sha256})
    assert [digest_in(orphan.name) for orphan in orphans] == [other.digest]
    assert store.remove(orphans[0])
    assert store.orphans({manifest.digest, blob.sha256}) == []


def test_dropped_is_gone_here_and_there_and_dropping_again_says_so(directory: Place) -> None:
    here, there = directory.store("m0"), directory.store("m1")
    manifest = here.publish_weights(Writer(1.0))
    assert here.drop_weights(manifest.digest)
    assert not here.drop_weights(manifest.digest)
    assert not there.has_weights(manifest.digest)
    assert not here.weights_path(manifest.digest).exists()
    blob = here.publish_blob("optimizer", lambda path: _write(path, b"state"))
    assert here.drop_blob("optimizer", blob.sha256)
    assert not here.has_blob("optimizer", blob.sha256)


def test_writer_that_fails_leaves_nothing(directory: Place) -> None:
    store = directory.store()

    def fails(path: Path) -> Any:
        path.write_bytes(b"half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.publish_weights(fails)
    assert store.everything() == []


# Outage and recovery


def files_that_fail(times: int) -> tuple[ArrowFiles, HeldBack, VirtualClock]:
    clock = VirtualClock()
    mock = fs._MockFileSystem(datetime.datetime.now(tz=datetime.UTC))
    held = HeldBack(mock, times=times)
    return ArrowFiles(held, "b/r", where="s3://b/r", clock=clock), held, clock


def test_store_that_is_away_for_a_while_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files, _, clock = files_that_fail(3)
    store = PolicyStore(tmp_path / "m0", files, clock=clock)
    began_ns = clock.ns
    manifest = store.publish_weights(Writer(1.0))
    assert clock.ns - began_ns == int(sum(PAUSES_S[:3]) * 1e9)
    assert store.has_weights(manifest.digest)
    assert caplog.text.count("trying again") == 3


def test_store_that_stays_away_is_one_clear_line(tmp_path: Path) -> None:
    files, held, clock = files_that_fail(10**6)
    store = PolicyStore(tmp_path / "m0", files, clock=clock)
    with pytest.raises(ResourceError, match="s3://b/r does not answer: writing weights/") as error:
        store.publish_weights(Writer(1.0))
    assert "\n" not in error.value.message
    assert "--resume" in (error.value.hint or "")
    assert held.calls == len(PAUSES_S) + 1
    assert not list((tmp_path / "m0").rglob("*.safetensors"))


@pytest.mark.parametrize(
    "says",
    [
        "AWS Error NO_SUCH_BUCKET during CreateMultipartUpload operation: The specified bucket...",
        "AWS Error ACCESS_DENIED during HeadObject operation: No response body.",
        "AWS Error SIGNATURE_DOES_NOT_MATCH during PutObject operation",
        "google::cloud::Status(PERMISSION_DENIED: Permanent error)",
    ],
)
def test_store_that_refuses_is_not_asked_again(tmp_path: Path, says: str) -> None:
    files, held, clock = files_that_fail(10**6)
    held.says = says
    store = PolicyStore(tmp_path / "m0", files, clock=clock)
    with pytest.raises(ResourceError, match="s3://b/r refuses: writing weights/") as error:
        store.publish_weights(Writer(1.0))
    assert says in error.value.message
    assert "does the bucket exist?" in (error.value.hint or "")
    assert held.calls == 1 and error.value.waited_out


def test_upload_that_arrives_in_part_is_made_again(tmp_path: Path) -> None:
    files, held, clock = files_that_fail(0)
    held.cut = 1
    store = PolicyStore(tmp_path / "m0", files, clock=clock)
    manifest = store.publish_weights(Writer(1.0))
    other = PolicyStore(tmp_path / "m1", files, clock=clock)
    assert other.verify(manifest.digest) == manifest
    assert [digest_in(file.name) for file in other.everything()] == [manifest.digest]


def test_download_of_other_bytes_is_refused_and_not_kept(tmp_path: Path) -> None:
    files, _, clock = files_that_fail(0)
    store = PolicyStore(tmp_path / "m0", files, clock=clock)
    weights, two = store.publish_weights(Writer(1.0)), store.publish_weights(Writer(2.0))
    files.put(store.weights_path(two.digest), weights_name(weights.digest))
    other = PolicyStore(tmp_path / "m1", files, clock=clock)
    with pytest.raises(PolicyError, match="does not match its name"):
        other.weights(weights.digest)
    assert not other.weights_path(weights.digest).exists()


# The cache


def test_copies_used_longest_ago_go_first_and_fresh_ones_stay(tmp_path: Path) -> None:
    clock = VirtualClock()
    paths = []
    for number in range(4):
        path = tmp_path / "weights" / f"{number}.safetensors"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 10)
        used_ns = clock.wall_ns() - int((KEEP_S + 100 - 20 * number) * 1e9)
        os.utime(path, ns=(used_ns, used_ns))
        paths.append(path)
    fresh = tmp_path / "optimizer" / "f.safetensors"
    fresh.parent.mkdir()
    fresh.write_bytes(b"x" * 10)
    os.utime(fresh, ns=(clock.wall_ns(), clock.wall_ns()))
    assert shrink(tmp_path, 25, clock) == paths[:3]
    assert shrink(tmp_path, 0, clock) == paths[3:]
    assert fresh.exists()


def test_copy_that_was_evicted_is_fetched_again(tmp_path: Path) -> None:
    files, _, clock = files_that_fail(0)
    store = PolicyStore(tmp_path / "m0", files, clock=clock, cache_bytes_max=1)
    weights = store.publish_weights(Writer(1.0))
    held = store.held_weights(weights.digest)
    clock.sleep(2 * KEEP_S)
    old_ns = clock.wall_ns() - int(1.5 * KEEP_S * 1e9)
    os.utime(store.weights_path(weights.digest), ns=(old_ns, old_ns))
    two = store.publish_weights(Writer(2.0))
    assert not store.weights_path(weights.digest).exists()
    assert held.exists()
    assert store.verify(weights.digest) == weights
    assert store.verify(two.digest) == two


# Addresses


def test_address_with_credentials_is_refused_without_repeating_them() -> None:
    with pytest.raises(ConfigError, match="must not hold credentials") as error:
        open_files("s3://key:secret@bucket/prefix")
    assert "secret" not in error.value.message


@pytest.mark.parametrize("url", ["nowhere://x/y", "file:relative", "s3://"])
def test_address_that_cannot_be_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url"):
        open_files(url)


def test_every_run_has_a_folder_of_its_own_under_an_address(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/shared"
    configs = [make_config(run__name=name, store__url=url) for name in ("one", "two")]
    first, second = (RunDir(tmp_path / config.run.name).policies(config) for config in configs)
    manifest = first.publish_weights(Writer(1.0))
    assert second.everything() == []
    assert (tmp_path / "shared" / "one" / weights_name(manifest.digest)).is_file()
    assert first.where == f"file://{tmp_path}/shared/one"


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
