"""The parts of `bench dataplane`: trajectories, moments, calls, the pipe, the broker's CPU time."""

from __future__ import annotations

import os
import socket
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.dataplane.layer import CALL_BYTES, CALL_RECORDS, calls_of
from dora_pipe.bench.dataplane.measure import BATCH_TOKENS, Setup, batch_of, bench_dataplane
from dora_pipe.bench.dataplane.pipe import PipeBus
from dora_pipe.bench.dataplane.process import GROUP_SIZE, PARTITIONS
from dora_pipe.bench.dataplane.procfs import cpu_s, listener_of, tree_cpu_s
from dora_pipe.bench.dataplane.publish import finish_moments
from dora_pipe.bench.dataplane.source import DIGESTS, Source, encoded, number_of
from dora_pipe.bus.port import Append, TopicPartition
from dora_pipe.core.errors import BusError, UsageError
from dora_pipe.schemas.headers import matches, parse_headers
from dora_pipe.schemas.trajectory_codec import decode_trajectory

TOPIC = "r.trajectories"


def test_trajectories_are_records_of_their_run_in_groups_of_one_version() -> None:
    source = Source("r", 40)
    records = [encoded(source(number), TOPIC) for number in range(3 * GROUP_SIZE)]
    decoded = [decode_trajectory(one.value) for one in records]
    headers = [parse_headers(one.headers) for one in records]
    assert len({one.trajectory for one in decoded}) == 3 * GROUP_SIZE
    assert [one.meta.sibling for one in decoded] == 3 * list(range(GROUP_SIZE))
    assert all(len(one.token_ids) == 40 and one.meta.run == "r" for one in decoded)
    assert all(matches(said, one) == [] for said, one in zip(headers, decoded, strict=True))
    for first in range(0, len(decoded), GROUP_SIZE):
        group = decoded[first : first + GROUP_SIZE]
        assert len({(one.meta.group, one.version, one.digest) for one in group}) == 1
        assert len({one.partition for one in records[first : first + GROUP_SIZE]}) == 1
    assert {one.version: one.digest for one in decoded} == DIGESTS


@given(number=st.integers(0, 10**9))
def test_a_trajectorys_number_can_be_read_from_its_id(number: int) -> None:
    assert number_of(_SOURCE(number).trajectory) == number


_SOURCE = Source("r", 4)


def test_trajectories_finish_at_random_moments_that_are_the_same_every_time() -> None:
    moments = finish_moments(1000.0, 2.0)
    assert moments == finish_moments(1000.0, 2.0)
    assert len(moments) == 2000
    assert moments == sorted(moments)
    assert moments[-1] / 1e9 == pytest.approx(2.0, rel=0.1)
    gaps = [after - before for before, after in pairwise(moments)]
    assert sum(gap > 2e6 for gap in gaps) / len(gaps) == pytest.approx(0.135, abs=0.03)


@pytest.mark.parametrize("tokens", [1, 256, 2_048, 16_384, 65_536, 10**6])
def test_batches_are_of_whole_groups_and_of_bounded_tokens(tokens: int) -> None:
    batch = batch_of(tokens)
    assert batch % GROUP_SIZE == 0
    assert batch == GROUP_SIZE or batch * tokens <= BATCH_TOKENS


@pytest.mark.parametrize("size", [1, 10_000, 1_000_000, 20_000_000])
def test_calls_hold_what_fits_into_both_bounds_and_leave_no_record_out(size: int) -> None:
    value = bytes(size)
    records = [Append(topic="t", value=value, partition=number) for number in range(12)]
    calls = calls_of(records)
    assert all(1 <= len(call) <= CALL_RECORDS for call in calls)
    assert all(len(call) == 1 or len(call) * size <= CALL_BYTES for call in calls)
    assert {one.partition for call in calls for one in call} == set(range(12))


def test_a_pipe_carries_records_whole_and_counts_them_per_partition() -> None:
    reads, writes = (PipeBus(fd, reads=number == 0) for number, fd in enumerate(os.pipe()))
    source = Source("r", 8)
    sent = [encoded(source(number), TOPIC) for number in (0, 1, GROUP_SIZE)]
    assert writes.writer().append(sent) == [0, 1, 0]
    positions = {TopicPartition(TOPIC, number): 0 for number in range(PARTITIONS)}
    reader = reads.reader(positions)
    assert [one.offset for one in reader.poll(timeout_s=1, records_max=2)] == [0, 1]
    (last,) = reader.poll(timeout_s=1)
    assert (last.key, last.value, last.headers) == (sent[2].key, sent[2].value, sent[2].headers)
    assert [reader.position(tp) for tp in positions] == [2, 1, 0, 0]
    assert reader.poll(timeout_s=0.0) == []
    writes.close()
    with pytest.raises(BusError, match="closed"):
        reader.poll(timeout_s=1)
    reads.close()


def test_a_broker_is_found_by_the_port_that_it_listens_on() -> None:
    with socket.socket() as listener, socket.socket() as other:
        listener.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        listener.listen()
        assert listener_of(listener.getsockname()[1]) == os.getpid()
        assert listener_of(other.getsockname()[1]) is None, "bound, but it does not listen"


def test_the_cpu_time_of_a_process_counts_user_and_system(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    after_name = ["S", *["0"] * 10, "250", "50", "9", "9"]
    (tmp_path / "7" / "stat").write_text(f"7 (a (bad) name) {' '.join(after_name)}")
    assert cpu_s(7, tmp_path) == 300 / os.sysconf("SC_CLK_TCK")
    assert cpu_s(8, tmp_path) == 0.0, "it is gone"
    assert cpu_s(os.getpid()) > 0


def test_the_cpu_time_of_a_tree_counts_children_that_live_and_that_have_ended(
    tmp_path: Path,
) -> None:
    for pid, times in {7: ["1", "2", "30", "40"], 8: ["500", "600", "9", "9"]}.items():
        (tmp_path / f"{pid}").mkdir()
        after_name = ["S", *["0"] * 10, *times]
        (tmp_path / f"{pid}" / "stat").write_text(f"{pid} (name) {' '.join(after_name)}")
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    (tmp_path / "7" / "task" / "7" / "children").write_text("8 9 ")
    assert tree_cpu_s(7, tmp_path) == (1 + 2 + 30 + 40 + 500 + 600) / os.sysconf("SC_CLK_TCK")
    assert tree_cpu_s(9, tmp_path) == 0.0, "it is gone"


@pytest.mark.parametrize(
    ("kafka", "tokens", "said"),
    [("", [], "needs a length"), ("sqlite:x", [8], "is not a broker"), ("kafka://", [8], "broker")],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    tmp_path: Path, kafka: str, tokens: list[int], said: str
) -> None:
    setup = Setup(kafka=kafka, tokens=tokens, seconds=1, repeats=1, folder=tmp_path)
    heard: list[str] = []
    with pytest.raises(UsageError, match=said):
        bench_dataplane(setup, heard.append)
    assert heard == []
