"""Tests of log locations sent to other processes."""

from pathlib import Path

import msgspec
import pytest

from dora_pipe.bus.blobs import BlobBus, BlobFiles
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config.model import Bus, Config, Model, Run, Task
from dora_pipe.config.outside import Store
from dora_pipe.core.errors import ConfigError
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.store.log_location import LogLocation


def _config(**changes: object) -> Config:
    plain = Config(
        run=Run(name="demo", steps=1), model=Model(path="m"), task=Task(kind="arithmetic")
    )
    return msgspec.structs.replace(plain, **changes)


def test_place_that_crossed_as_bytes_opens_the_same_log(tmp_path: Path) -> None:
    location = RunDir(tmp_path).log_location(_config())
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(location), type=LogLocation)
    assert there == location
    SqliteBus(tmp_path / "log.sqlite").close()
    here = location.open()
    here.create([TopicSpec(name="t", partitions=1)])
    here.writer().append([Append(topic="t", value=b"one")])
    bus = there.open()
    reader = bus.reader({TopicPartition("t", 0): 0})
    assert [record.value for record in reader.poll(timeout_s=1.0)] == [b"one"]
    assert isinstance(bus, BlobBus)


def test_place_holds_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORA_PIPE_KAFKA_PASSWORD", "open sesame")
    bus = Bus(url="kafka://localhost:1", protocol="SASL_SSL", username="worker")
    location = RunDir(tmp_path).log_location(_config(bus=bus))
    assert b"sesame" not in msgspec.json.encode(location)
    assert location.bus is not None
    assert location.bus.username == "worker"


def test_place_without_the_secret_it_needs_is_one_line(tmp_path: Path) -> None:
    bus = Bus(url="kafka://localhost:1", protocol="SASL_SSL", username="worker")
    with pytest.raises(ConfigError):
        RunDir(tmp_path).log_location(_config(bus=bus)).open()


def test_large_values_lie_with_the_policies(tmp_path: Path) -> None:
    store = Store(path=str(tmp_path / "elsewhere"))
    location = RunDir(tmp_path).log_location(_config(store=store))
    assert location.blobs == str(tmp_path / "elsewhere" / "blobs")


@pytest.mark.parametrize(
    ("given", "above", "synced"),
    [
        ({"bus": Bus()}, 256 * 1024, True),
        ({"bus": Bus(url="kafka://h:1")}, 256 * 1024, False),
        ({"bus": Bus(url="kafka://h:1", blob_fsync=True)}, 256 * 1024, True),
    ],
)
def test_values_above_the_configured_bound_lie_in_files_as_safe_as_the_log_keeps_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Bus], above: int, synced: bool
) -> None:
    monkeypatch.setattr("dora_pipe.bus._open", lambda url, security: MemoryBus(MemoryLog()))
    bus = RunDir(tmp_path).log_location(_config(**given)).open()
    assert isinstance(bus, BlobBus) and isinstance(bus.store, BlobFiles)
    assert (bus.above_bytes, bus.store.synced) == (above, synced)


def test_values_in_a_store_a_round_trip_away_are_those_that_no_topic_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.bus._open", lambda url, security: MemoryBus(MemoryLog()))
    store = Store(url=f"file://{tmp_path}/shared")
    bus = RunDir(tmp_path).log_location(_config(store=store)).open()
    assert isinstance(bus, BlobBus)
    assert bus.above_bytes is None
