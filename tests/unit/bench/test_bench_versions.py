"""Tests of `bench versions`: stages from publication to a first token."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench import versions


@pytest.mark.slow
def test_every_stage_of_a_version_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ways = [entry for entry in versions.WAYS if entry.name == "peer"]
    full, delta = versions.bench_versions(tmp_path, 1, ways)
    assert (full.stored_as, delta.stored_as) == ("whole", "delta")
    for figure in (full, delta):
        assert (
            min(figure.stored_s, figure.fetched_s, figure.loaded_s, figure.token_s, figure.copy_s)
            > 0
        )
        assert figure.s_per_gb == pytest.approx(figure.total_s / figure.megabytes * 1e3, rel=0.02)
