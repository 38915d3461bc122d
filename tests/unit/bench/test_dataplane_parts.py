"""The parts of `bench dataplane`: trajectories, moments, batches, figures."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.dataplane.measure import (
    BATCH_TOKENS,
    Setup,
    batch_of,
    bench_dataplane,
    percentile,
    plane_figure,
)
from dora_pipe.bench.dataplane.process import GROUP_SIZE, Done
from dora_pipe.bench.dataplane.publish import finish_moments
from dora_pipe.bench.dataplane.source import DIGESTS, Source, encoded, number_of
from dora_pipe.core.errors import UsageError
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
    assert moments == finish_moments(1000.0, 2.0) == sorted(moments)
    assert len(moments) == 2000
    assert moments[-1] / 1e9 == pytest.approx(2.0, rel=0.1)
    gaps = [after - before for before, after in pairwise(moments)]
    assert sum(gap > 2e6 for gap in gaps) / len(gaps) == pytest.approx(0.135, abs=0.03)


@pytest.mark.parametrize("tokens", [1, 256, 2_048, 16_384, 65_536, 10**6])
def test_batches_are_of_whole_groups_and_of_bounded_tokens(tokens: int) -> None:
    batch = batch_of(tokens)
    assert batch % GROUP_SIZE == 0
    assert batch == GROUP_SIZE or batch * tokens <= BATCH_TOKENS


def _done(moments: list[int], end_ns: int, cpu_s: float) -> Done:
    count = len(moments)
    return Done(
        records=count,
        bytes=100 * count,
        start_ns=0,
        end_ns=end_ns,
        cpu_s=cpu_s,
        moments=moments,
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
