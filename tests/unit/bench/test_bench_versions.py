"""Tests of `bench versions`: stages from publication to a first token."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench import versions


@pytest.mark.slow
def test_every_stage_of_a_version_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ways = [one for one in versions.WAYS if one.name == "peer"]
    whole, delta = versions.bench_versions(tmp_path, 1, ways)
    assert (whole.stored_as, delta.stored_as) == ("whole", "delta")
    for one in (whole, delta):
        assert min(one.stored_s, one.fetched_s, one.loaded_s, one.token_s, one.copy_s) > 0
        assert one.s_per_gb == pytest.approx(one.total_s / one.megabytes * 1e3, rel=0.02)
