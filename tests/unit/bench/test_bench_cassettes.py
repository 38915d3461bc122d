"""The bench of cassettes, on a small one."""

from dora_pipe.bench.cassettes import bench_cassette


def test_a_small_cassette_has_every_figure() -> None:
    found = bench_cassette(64)
    assert (found.calls, found.file_mb > 0, found.open_s > 0) == (64, True, True)
    assert min(found.looked_up_per_s, found.recorded_per_s) > 0
