"""Tests of parts of `bench dataplane`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench.dataplane.measure import Setup, bench_dataplane, percentile, plane_figure
from dora_pipe.bench.dataplane.process import GROUP_SIZE, Done
from dora_pipe.bench.dataplane.source import DIGESTS, Source, encoded
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.headers import matches, parse_headers
from dora_pipe.schemas.trajectory_codec import decode_trajectory

TOPIC = "r.trajectories"


def test_trajectories_are_records_of_their_run_in_groups_of_one_version() -> None:
    source = Source("r", 40)
    records = [encoded(source(number), TOPIC) for number in range(3 * GROUP_SIZE)]
    decoded = [decode_trajectory(record.value) for record in records]
    headers = [parse_headers(record.headers) for record in records]
    assert len({record.trajectory for record in decoded}) == 3 * GROUP_SIZE
    assert [trajectory.meta.sample for trajectory in decoded] == 3 * list(range(GROUP_SIZE))
    assert all(
        len(trajectory.token_ids) == 40 and trajectory.meta.run == "r" for trajectory in decoded
    )
    assert all(
        matches(header, record) == [] for header, record in zip(headers, decoded, strict=True)
    )
    for first in range(0, len(decoded), GROUP_SIZE):
        group = decoded[first : first + GROUP_SIZE]
        assert (
            len(
                {
                    (trajectory.meta.group, trajectory.version, trajectory.digest)
                    for trajectory in group
                }
            )
            == 1
        )
        assert len({record.partition for record in records[first : first + GROUP_SIZE]}) == 1
    assert {record.version: record.digest for record in decoded} == DIGESTS


def _done(moments: list[int], end_ns: int, cpu_s: float) -> Done:
    count = len(moments)
    return Done(
        records=count, bytes=100 * count, start_ns=0, end_ns=end_ns, cpu_s=cpu_s, moments=moments
    )


def test_a_figure_is_the_median_of_its_repeats() -> None:
    rounds = []
    for end_ns, late_ns in ((1_000_000_000, 1_000_000), (2_000_000_000, 3_000_000)):
        full = _done([0] * 10, 1, 0.001), _done([1] * 10, end_ns, 0.002)
        light = _done([0, 10], 1, 0.0), _done([late_ns, 10 + late_ns], end_ns, 0.0)
        rounds.append((full, light))
    figure = plane_figure("sqlite", 30, rounds)
    assert (figure.bytes, figure.trajectories_per_s, figure.spread) == (100, 7.5, "5-10")
    assert figure.mb_per_s == pytest.approx(7.5e-4)
    assert figure.cpu_us == pytest.approx(300)
    assert (figure.p50_ms, figure.p50_spread, figure.p99_ms) == (2.0, "1.00-3.00", 2.0)
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0


@pytest.mark.parametrize(
    ("kafka", "tokens", "text"),
    [
        ("", [], "must be positive"),
        ("sqlite:x", [8], "is not a broker"),
        ("kafka://", [8], "broker"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    tmp_path: Path, kafka: str, tokens: list[int], text: str
) -> None:
    setup = Setup(kafka=kafka, tokens=tokens, seconds=1, repeats=1, folder=tmp_path)
    heard: list[str] = []
    with pytest.raises(UsageError, match=text):
        bench_dataplane(setup, heard.append)
    assert heard == []
