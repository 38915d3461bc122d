"""Property tests of buses against a list with gaps."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.bus.bus import Bus, Reader, TopicSpec
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.pure.records import Append, TopicPartition

PARTITIONS = 3

sizes = st.integers(min_value=0, max_value=40)
partitions = st.integers(min_value=0, max_value=PARTITIONS - 1)
append_steps = st.lists(st.tuples(partitions, sizes), min_size=1, max_size=6)
poll_steps = st.tuples(st.integers(1, 5), st.integers(1, 80))
seek_steps = st.tuples(partitions, st.floats(0, 1))
steps = st.lists(
    st.one_of(
        append_steps.map(lambda step: ("append", step)),
        poll_steps.map(lambda step: ("poll", step)),
        seek_steps.map(lambda step: ("seek", step)),
    ),
    max_size=25,
)


class Model:
    def __init__(self, bus: Bus, reader: Reader) -> None:
        self.bus, self.reader = bus, reader
        self.writer = bus.writer()
        self.offsets: dict[int, list[int]] = defaultdict(list)
        self.values: dict[int, list[bytes]] = defaultdict(list)
        self.count = 0

    def append(self, step: list[tuple[int, int]]) -> None:
        call = []
        for partition, size in step:
            self.count += 1
            value = b"%d:" % self.count + bytes(size)
            call.append(Append(topic="t", partition=partition, value=value))
        for each, offset in zip(call, self.writer.append(call), strict=True):
            assert not self.offsets[each.partition] or offset > self.offsets[each.partition][-1]
            self.offsets[each.partition].append(offset)
            self.values[each.partition].append(each.value)

    def seek(self, step: tuple[int, float]) -> None:
        partition = TopicPartition("t", step[0])
        position = round(step[1] * self.bus.end(partition))
        self.reader.seek(partition, position)
        assert self.reader.position(partition) == position

    def poll(self, step: tuple[int, int]) -> int:
        records_max, bytes_max = step
        before = {p: self.reader.position(TopicPartition("t", p)) for p in range(PARTITIONS)}
        records = self.reader.poll(timeout_s=0, records_max=records_max, bytes_max=bytes_max)
        assert len(records) <= records_max
        assert len(records) <= 1 or sum(len(record.value) for record in records) <= bytes_max
        for p in range(PARTITIONS):
            mine = [record for record in records if record.partition == p]
            first = bisect_left(self.offsets[p], before[p])
            expected_slice = slice(first, first + len(mine))
            assert [record.offset for record in mine] == self.offsets[p][expected_slice]
            assert [record.value for record in mine] == self.values[p][expected_slice]
            self.check_position(p, first + len(mine), before[p])
        return len(records)

    def check_position(self, partition: int, passed: int, before: int) -> None:
        tp = TopicPartition("t", partition)
        position = self.reader.position(tp)
        assert before <= position <= self.bus.end(tp)
        assert not passed or position > self.offsets[partition][passed - 1]
        rest = self.offsets[partition][passed:]
        assert not rest or position <= rest[0]


def check_against_model(bus: Bus, script: list[tuple[str, object]]) -> None:
    bus.create([TopicSpec(name="t", partitions=PARTITIONS)])
    places = [TopicPartition("t", partition) for partition in range(PARTITIONS)]
    model = Model(bus, bus.reader(dict.fromkeys(places, 0)))
    for name, step in script:
        getattr(model, name)(step)
    while model.poll((100, 1 << 20)):
        pass
    assert all(model.reader.position(position) == bus.end(position) for position in places), (
        "caught up"
    )
    bus.close()


@given(steps)
def test_the_memory_bus_is_a_list_with_gaps(script: list[tuple[str, object]]) -> None:
    check_against_model(MemoryBus(), script)


@settings(max_examples=60)
@given(script=steps)
def test_the_sqlite_bus_is_a_list_with_gaps(
    tmp_path_factory: pytest.TempPathFactory, script: list[tuple[str, object]]
) -> None:
    check_against_model(SqliteBus(tmp_path_factory.mktemp("bus") / "log.sqlite"), script)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_no_partition_starves_another(kind: str, tmp_path: Path) -> None:
    bus: Bus = MemoryBus() if kind == "memory" else SqliteBus(tmp_path / "log.sqlite")
    bus.create([TopicSpec(name="t", partitions=2)])
    flood = [Append(topic="t", value=b"flood")] * 100
    bus.writer().append([*flood, Append(topic="t", partition=1, value=b"other")])
    reader = bus.reader({TopicPartition("t", number): 0 for number in range(2)})
    indices = [record for _ in range(3) for record in reader.poll(timeout_s=0, records_max=10)]
    assert b"other" in [record.value for record in indices]
    bus.close()
