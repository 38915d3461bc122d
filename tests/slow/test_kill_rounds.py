"""Thirty kill rounds: every role at random moments and at each moment that matters."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.faults import kill_rounds

pytestmark = pytest.mark.slow

ROUNDS = 30
LIMIT_S = 3000.0


def test_thirty_kill_rounds_are_clean(tmp_path: Path) -> None:
    done = kill_rounds(tmp_path, "--rounds", str(ROUNDS), "--seed", "7", limit_s=LIMIT_S)
    assert done.code == 0, done.talk
    roles = Counter(row["role"].rstrip("01") for row in done.rows)
    assert roles == {"w": 10, "trainer": 10, "orchestrator": 10}
    assert [row["round"] for row in done.rows if not row["clean"]] == []
    phases = [row["phase"] for row in done.rows]
    for moment in (
        "in the middle of the append of trajectory",
        "in the middle of the append of step-committed",
        "in the middle of the append of round",
        "before the append of step-committed",
        "policy file named, not committed",
        "right after the append of step-committed",
        "right after the append of trajectory",
        "before the append of round",
    ):
        assert any(phase.startswith(moment) for phase in phases), moment
    assert f"{ROUNDS} of {ROUNDS} rounds clean" in done.talk
    assert "time to recover: median" in done.talk
