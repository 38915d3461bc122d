"""A disk that is really full, below the log, below the policies and below a broker."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.consumers.learners.simulated import initial_weights
from dora_pipe.core.errors import BusError, BusFull, ResourceError
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.store.store import PolicyStore
from tests.support.cluster import Cluster, make_config
from tests.support.kafka_broker import KafkaBroker
from tests.support.small_disk import SmallDisk, small_disk

SIZE_MIB = 32
ROOM_BYTES = 150_000
SLEEPS = 12
"""So often the roles wait before somebody makes room."""
AT = TopicPartition("t", 0)
WAIT_S = 60.0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", SIZE_MIB) as disk:
        yield disk


def test_a_run_waits_on_a_full_disk_and_goes_on_when_there_is_room(
    tmp_path: Path, disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    path = disk.path / "run"
    path.mkdir()
    (tmp_path / "policies").mkdir()
    (path / "policies").symlink_to(tmp_path / "policies")
    with Cluster(path, make_config(run__steps=6)) as cluster:
        cluster.until(lambda: cluster.version >= 1)
        disk.fill(but_bytes=ROOM_BYTES)
        slept: list[float] = []

        def sleep(seconds: float) -> None:
            cluster.clock.ns += int(seconds * 1e9)
            slept.append(seconds)
            if len(slept) == SLEEPS:
                disk.make_room()

        cluster.clock.sleep = sleep  # type: ignore[method-assign]
        with caplog.at_level(logging.WARNING):
            cluster.run()
        assert len(slept) >= SLEEPS, "the disk was full"
        assert any("trying again" in record.message for record in caplog.records)
        assert cluster.clean_report().finished


def test_a_full_disk_refuses_an_append_whole_and_keeps_what_was_there(disk: SmallDisk) -> None:
    with closing(SqliteBus(disk.path / "log.sqlite")) as bus:
        bus.create([TopicSpec(name="t")])
        writer = bus.writer()
        for number in range(20):
            writer.append([Append(topic="t", value=b"%d" % number)])
        disk.fill()
        with pytest.raises(BusFull) as full:
            for _ in range(1000):
                writer.append([Append(topic="t", value=bytes(50_000))] * 4)
        assert "\n" not in full.value.message
        reader = bus.reader({AT: 0})
        before = [record for _ in range(30) for record in reader.poll(timeout_s=0.0)]
        assert [record.value for record in before[:20]] == [b"%d" % number for number in range(20)]
        assert (len(before) - 20) % 4 == 0, "no call was taken in part"
        disk.make_room()
        writer.append([Append(topic="t", value=b"after")])
        assert [record.value for record in reader.poll(timeout_s=0.0)] == [b"after"]


def test_a_full_disk_refuses_a_policy_and_leaves_no_half_of_it(disk: SmallDisk) -> None:
    store = PolicyStore(disk.path / "policies")
    disk.fill()
    with pytest.raises(ResourceError, match="no space left") as full:
        store.publish_weights(initial_weights)
    assert "\n" not in full.value.message
    assert "--resume" in (full.value.hint or "")
    paths = [path for path in (disk.path / "policies").rglob("*.safetensors")]
    assert [path.name for path in paths if not path.name.startswith(".")] == []
    disk.make_room()
    manifest = store.publish_weights(initial_weights)
    assert store.verify(manifest.digest) == manifest


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_broker_whose_disk_is_full_comes_back_with_everything_acknowledged(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "broker", 64) as disk, KafkaBroker(disk.path) as broker:
        bus = KafkaBus([broker.bootstrap], delivery_limit_s=3.0)
        bus.create([TopicSpec(name="t")])
        writer, value = bus.writer(), bytes(400_000)
        acknowledged: list[int] = []
        with pytest.raises(BusError) as refused:
            for number in range(1000):
                head = b"%06d" % number
                writer.append([Append(topic="t", value=head + value)])
                acknowledged.append(number)
        assert "\n" not in refused.value.message
        assert len(acknowledged) > 20
        bus.close()
        broker.kill()
        disk.grow(256)
        broker.start()
        with closing(KafkaBus([broker.bootstrap])) as bus:
            bus.writer().append([Append(topic="t", value=b"after")])
            results: list[bytes] = []
            reader = bus.reader({AT: 0})
            until_s = time.monotonic() + WAIT_S
            while (not results or results[-1] != b"after") and time.monotonic() < until_s:
                results += [record.value[:6] for record in reader.poll(timeout_s=0.5)]
        kept = [int(result) for result in results[:-1]]
        assert kept[: len(acknowledged)] == acknowledged
        assert len(kept) <= len(acknowledged) + 2
    gc.collect()
