"""Tests of blobs in local and remote policy stores."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from pyarrow import fs

from dora_pipe.bus.blobs import BlobBus
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.errors import BusError, BusFull, ResourceError
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.store.arrow_files import ArrowFiles
from dora_pipe.store.log_location import SharedBlobs

VALUE = b"value" * 1000
DIGEST = sha256(VALUE).hexdigest()


def shared(tmp_path: Path, machine: str) -> SharedBlobs:
    return SharedBlobs(
        ArrowFiles(fs.LocalFileSystem(), str(tmp_path / "shared")), tmp_path / machine
    )


def test_one_machine_writes_and_another_reads(tmp_path: Path) -> None:
    log = MemoryLog()
    here = BlobBus(MemoryBus(log), shared(tmp_path, "here"))
    here.create([TopicSpec(name="r.progress", max_record_bytes=1000)])
    here.writer().append([Append(topic="r.progress", value=VALUE)])
    there = BlobBus(MemoryBus(log), shared(tmp_path, "there"))
    reader = there.reader({TopicPartition("r.progress", 0): 0})
    assert [record.value for record in reader.poll(timeout_s=0)] == [VALUE]
    assert (tmp_path / "shared" / "blobs" / DIGEST).read_bytes() == VALUE
    for machine in ("here", "there"):
        assert list((tmp_path / machine).iterdir()) == [], "nothing stays on a machine"


class GoneFiles(ArrowFiles):
    def put(self, source: Path, name: str) -> None:
        raise ResourceError("the store is away")

    def get(self, name: str, target: Path) -> bool:
        raise ResourceError("the store is away")


def test_a_store_that_is_away_is_an_error_of_the_log_that_is_tried_again(tmp_path: Path) -> None:
    blobs = SharedBlobs(GoneFiles(fs.LocalFileSystem(), "nowhere"), tmp_path)
    with pytest.raises(BusFull, match="nowhere"):
        blobs.write(DIGEST, VALUE)
    with pytest.raises(BusError, match="away"):
        blobs.read(DIGEST, len(VALUE))
