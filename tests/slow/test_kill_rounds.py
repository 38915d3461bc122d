"""Kill rounds: every role and every broker, at random and at critical moments.

The load of the machine shifts the moments; no record may be lost at any of them.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.faults import kill_rounds
from tests.support.kill_rounds.rounds import DEAD_S

pytestmark = pytest.mark.slow

ROUNDS = (("0", 12), ("15", 3))
"""From which, and how many: each role at three moments of its own and at a drawn one, twice, then
at a fourth of its own. What lies between is drawn once, not twice."""
KAFKA_ROUNDS = 4
LEADER_ROUNDS = 2
DEAD_ROUNDS = 3
LIMIT_S = 3000.0


def test_kill_rounds_are_clean(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    for first, count in ROUNDS:
        words = ("--from", first, "--rounds", str(count), "--seed", "7")
        done = kill_rounds(tmp_path, *words, limit_s=LIMIT_S)
        assert done.code == 0, done.talk
        assert f"{count} of {count} rounds clean" in done.talk
        assert "time to recover: median" in done.talk
        rows += done.rows
    roles = Counter(row["role"].rstrip("01") for row in rows)
    assert roles == {"w": 5, "trainer": 5, "orchestrator": 5}
    assert [row["round"] for row in rows if not row["clean"]] == []
    phases = [row["phase"] for row in rows]
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


@pytest.mark.kafka
def test_kill_rounds_on_a_real_broker_are_clean_the_broker_among_the_killed(tmp_path: Path) -> None:
    words = ("--bus", "kafka", "--rounds", str(KAFKA_ROUNDS), "--seed", "3")
    done = kill_rounds(tmp_path, *words, limit_s=LIMIT_S)
    assert done.code == 0, done.talk
    roles = Counter(row["role"].rstrip("01") for row in done.rows)
    assert roles == {"w": 1, "trainer": 1, "orchestrator": 1, "broker": 1}
    phases = [row["phase"] for row in done.rows]
    assert any(phase.startswith("in the middle of the append of") for phase in phases)
    assert all(row["lost"] == row["trained_twice"] == 0 for row in done.rows)
    assert all(row["trajectories"] > 0 for row in done.rows)
    assert "time to recover, broker: median" in done.talk
    assert list(tmp_path.iterdir()) == []


@pytest.mark.kafka
def test_rounds_in_which_a_leader_of_three_brokers_is_killed_are_clean(tmp_path: Path) -> None:
    words = ("--bus", "kafka", "--brokers", "3", "--rounds", str(LEADER_ROUNDS), "--seed", "3")
    done = kill_rounds(tmp_path, *words, limit_s=LIMIT_S)
    assert done.code == 0, done.talk
    assert [row["role"] for row in done.rows] == ["broker"] * LEADER_ROUNDS
    assert all(row["phase"].startswith("broker led ") for row in done.rows)
    assert all(row["recovered_s"] > 0 for row in done.rows)


@pytest.mark.kafka
def test_a_role_that_dies_inside_its_append_and_stays_dead_costs_the_others_nothing(
    tmp_path: Path,
) -> None:
    words = ("--bus", "kafka", "--stay-dead", "--rounds", str(DEAD_ROUNDS), "--seed", "3")
    done = kill_rounds(tmp_path, *words, limit_s=LIMIT_S)
    assert done.code == 0, done.talk
    roles = Counter(row["role"].rstrip("01") for row in done.rows)
    assert roles == {"w": 1, "trainer": 1, "orchestrator": 1}
    assert all(row["phase"].startswith("in the middle of the append of") for row in done.rows)
    assert all(row["others"] == [] for row in done.rows)
    assert all((row["recovered_s"] or DEAD_S) >= DEAD_S for row in done.rows)
