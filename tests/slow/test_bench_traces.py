"""`bench traces` on a run of a few steps: real processes, traces that arrive, a ratio."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.user_run import assert_clean, call, furnish

pytestmark = pytest.mark.slow


def test_runs_with_and_without_stand_side_by_side(tmp_path: Path) -> None:
    place = furnish(tmp_path)
    words = ("--rounds", "1", "--steps", "4", "--ratio", "1", "--keep", "kept", "--json")
    assert call(place, "bench", "traces", "config.toml", *words) == 0
    said = (place / "said").read_text().splitlines()
    lines = [json.loads(line) for line in said if line.startswith("{")]
    assert "traces_ratio 1" in lines[0]["setting"]
    off, on = (line for line in lines if "traces" in line)
    assert (off["traces"], on["traces"]) == ("off", "on")
    assert (off["requests"], off["megabytes"]) == (0, 0)
    assert on["requests"] > 0 and on["megabytes"] > 0
    costs = [line for line in lines if "figure" in line]
    assert len(costs) == 2
    for cost in costs:
        ratio = on[cost["figure"]] / off[cost["figure"]]
        assert cost["ratio"] == pytest.approx(ratio, rel=0.01)
    (place / "runs").symlink_to(place / "kept")
    for run in ("off-0", "on-0"):
        assert_clean(place, run)
