"""`diff` of two runs: nothing where they are one, else where they part and the first trajectory
that comes out otherwise under equal weights.

Method: a recorded run beside a copy of itself in which one thing was forged from end to end.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import damage
from tests.support.command_line import Call, caller
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Calls the command line."""
    return caller(monkeypatch, capsys)


def diffed(call: Call, one: RecordedRun, other: RecordedRun) -> dict[str, Any]:
    code, out, err = call("diff", str(one.directory), str(other.directory), "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_run_does_not_differ_from_its_copy(
    recorded: RecordedRun, copy: RecordedRun, call: Call
) -> None:
    found = diffed(call, recorded, copy)
    assert (found["config"], found["made_of"], found["trajectory"]) == ({}, {}, None)
    assert [found[name]["at"] for name in ("versions", "dispatched", "batches")] == [None] * 3
    assert found["compared"] > 200
    code, out, _ = call("diff", str(recorded.directory), str(copy.directory))
    assert code == 0
    assert "trajectories   the same" in out
    assert out.splitlines()[0] == "settings       the same"


def test_the_first_trajectory_with_another_reward_is_named(
    recorded: RecordedRun, copy: RecordedRun, call: Call
) -> None:
    with Tamper(copy) as log:
        name = damage.forge_evaluation(log)
    found = diffed(call, recorded, copy)
    assert found["trajectory"]["trajectory"] == name
    assert (found["trajectory"]["cause"], found["trajectory"]["place"]) == ("reward", None)
    assert "the same text is worth 0.0 and 1.0" in found["trajectory"]["words"]
    code, out, _ = call("diff", str(recorded.directory), str(copy.directory))
    assert code == 0
    assert f"{name} is the first of {found['compared']} that differs: reward" in out


def test_a_run_that_is_not_there_is_named(recorded: RecordedRun, call: Call) -> None:
    code, _, err = call("diff", str(recorded.directory), "nowhere")
    assert code == 2
    assert "no run 'nowhere'" in err
