"""Tests of `diff` on a recorded run and a copy with one planted difference."""

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
    code, out, err = call("diff", one.directory, other.directory, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_run_does_not_differ_from_its_copy(
    recorded: RecordedRun, copy: RecordedRun, call: Call
) -> None:
    found = diffed(call, recorded, copy)
    assert (found["config"], found["made_of"], found["partings"]) == ({}, {}, [])
    assert found["compared"]["trajectory"] > 200
    code, out, _ = call("diff", recorded.directory, copy.directory)
    assert code == 0
    assert out.startswith("no difference in ")


def test_a_planted_trajectory_is_the_first_record(
    recorded: RecordedRun, copy: RecordedRun, call: Call
) -> None:
    with Tamper(copy) as log:
        name = damage.forge_evaluation(log)
    found = diffed(call, recorded, copy)
    assert [(one["kind"], one["name"]) for one in found["partings"]] == [("trajectory", name)]
    code, out, _ = call("diff", recorded.directory, copy.directory)
    assert code == 0
    first, *_ = out.splitlines()
    assert first.startswith(f"first record   trajectory {name}: tokens ")
    assert "reward 0.0 | tokens " in first and first.endswith("reward 1.0")
    assert "no recorded setting differs" in out


def test_a_run_that_is_not_there_is_named(recorded: RecordedRun, call: Call) -> None:
    code, _, err = call("diff", recorded.directory, "nowhere")
    assert code == 2
    assert "no run 'nowhere'" in err
