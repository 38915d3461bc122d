"""Tests of parts of `bench dataplane`."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench.dataplane.measure import Setup, bench_dataplane, percentile, plane_figure
from dora_pipe.bench.dataplane.process import Done
from dora_pipe.core.errors import UsageError


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
