"""The restart bench measures what it says, on a short log."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.bench.restart import bench_restart


def test_both_ways_come_to_the_same_state_and_the_short_one_folds_less(tmp_path: Path) -> None:
    (found,) = bench_restart(tmp_path, [1_000])
    assert found.rounds > 20 and found.steps == 8
    assert 0 < found.rounds_after < found.rounds
    assert found.folded_s > 0 and found.snapshot_s > 0
    assert 0 < found.file_bytes < found.state_bytes
