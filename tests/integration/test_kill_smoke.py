"""One kill round per role, the production processes on a small model: clean, and said so."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.faults import kill_rounds

LIMIT_S = 400.0


def test_worker_trainer_and_orchestrator_are_killed_and_nothing_is_lost(tmp_path: Path) -> None:
    done = kill_rounds(tmp_path, "--rounds", "3", "--seed", "1", limit_s=LIMIT_S)
    assert done.code == 0, done.talk
    assert [row["role"].rstrip("01") for row in done.rows] == ["w", "trainer", "orchestrator"]
    phases = [row["phase"].rpartition(",")[0] for row in done.rows]
    assert phases == [
        "in the middle of the append of trajectory",
        "before the append of step-committed",
        "before the append of round",
    ]
    for row in done.rows:
        assert row["clean"], row
        assert (row["audit"], row["lost"], row["trained_twice"]) == ("clean", 0, 0)
        assert row["weights_equal"] and row["moved"] and row["finished"]
        assert row["steps"] == 6 and row["acknowledged"] > 100
        assert row["recovered_s"] > 0
    assert done.talk.count("was killed (SIGKILL)") == 3
    assert "3 of 3 rounds clean" in done.talk
    assert list(tmp_path.iterdir()) == []
