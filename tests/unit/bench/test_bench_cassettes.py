"""The bench of cassettes, on a small one."""

import pytest

from dora_pipe.bench import cassettes
from dora_pipe.bench.cassettes import bench_cassette, bench_door


def test_a_small_cassette_has_every_figure() -> None:
    found = bench_cassette(64)
    assert (found.calls, found.file_mb > 0, found.open_s > 0) == (64, True, True)
    assert min(found.looked_up_per_s, found.recorded_per_s) > 0


@pytest.mark.slow
def test_a_small_door_has_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cassettes, "RECORDED", 8)
    monkeypatch.setattr(cassettes, "COMMANDS", 1)
    found = bench_door()
    assert min(found.door_ms, found.looked_up_per_s, found.recorded_per_s, found.command_cpu_ms) > 0
