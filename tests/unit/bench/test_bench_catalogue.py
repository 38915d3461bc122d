"""`bench catalogue` measures what it says: a small log, followed, saved and asked."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.bench.catalogue import SIBLINGS, bench_follow, bench_memory


def test_a_written_log_is_followed_saved_and_asked(tmp_path: Path) -> None:
    (found,) = bench_follow(tmp_path, [256])
    assert found.trajectories == 256
    assert min(found.follow_us, found.file_bytes, found.open_ms, found.overview_ms) > 0


def test_a_played_run_has_every_group_trained() -> None:
    found = bench_memory(600)
    assert (found.groups, found.trajectories) == (600, 600 * SIBLINGS)
    assert found.us > 0
