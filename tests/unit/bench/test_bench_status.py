"""What a worker's statuses add to the log: bytes, not times, so a bound is held everywhere."""

from __future__ import annotations

from dora_pipe.bench.status import bench_status


def test_idle_worker_says_below_200_bytes_per_second_and_one_with_80_requests_below_1000() -> None:
    idle, busy = bench_status()
    assert (idle.running, busy.running) == (0, 80)
    assert 0 < idle.bytes_per_s < 200
    assert idle.statuses_per_s >= 4 / 10, "four times in a lease"
    assert 0 < busy.bytes_per_s < 1000
    assert busy.statuses_per_s >= 0.5


def test_figures_are_the_same_each_time() -> None:
    assert bench_status([8]) == bench_status([8])
