"""Tests of bus addresses and names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dora_pipe.bus import open_bus
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.checks import PARTITIONS_MAX, check_position, check_spec, record_bytes
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusError, UsageError
from dora_pipe.core.pure.records import Append, TopicPartition


def test_a_sqlite_address_is_a_path(tmp_path: Path) -> None:
    bus = open_bus(f"sqlite:{tmp_path}/a b:c.sqlite")
    assert isinstance(bus, SqliteBus)
    assert bus.path == tmp_path / "a b:c.sqlite"
    bus.create([TopicSpec(name="t")])
    assert bus.path.exists()
    bus.close()


@pytest.mark.parametrize("url", ["memory:", "memory", "", "sqlite:", "kafka://", "redis://x", "/x"])
def test_any_other_address_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        open_bus(url)
    assert refused.value.hint and "sqlite:" in refused.value.hint


def test_memory_is_refused_because_it_lives_in_one_process() -> None:
    with pytest.raises(UsageError, match="memory") as refused:
        open_bus("memory:")
    assert refused.value.hint and "between processes" in refused.value.hint


def test_only_a_kafka_address_imports_kafka(tmp_path: Path) -> None:
    code = (
        "import sys; from dora_pipe.bus import open_bus; "
        f"open_bus('sqlite:{tmp_path}/log').topics(); "
        "sys.exit('kafka' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("partitions", [0, -1, PARTITIONS_MAX + 1])
def test_a_topic_has_partitions_within_bounds(partitions: int) -> None:
    with pytest.raises(BusError, match="partitions"):
        check_spec(TopicSpec(name="t", partitions=partitions))
    check_spec(TopicSpec(name="t", partitions=PARTITIONS_MAX))


def test_a_topic_must_take_records_of_some_size() -> None:
    with pytest.raises(BusError, match="max_record_bytes"):
        check_spec(TopicSpec(name="t", max_record_bytes=0))


@pytest.mark.parametrize("position", [-1, 1 << 41])
def test_a_position_no_log_can_have_is_refused(position: int) -> None:
    with pytest.raises(BusError, match="t/3"):
        check_position(TopicPartition("t", 3), position)


def test_a_record_is_as_large_as_its_key_value_and_headers() -> None:
    record = Append(topic="t", key=b"12", value=b"345", headers=(("67", b"89"), ("0", b"")))
    assert record_bytes(record) == 10
