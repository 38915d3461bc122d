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
    return caller(monkeypatch, capsys)


def diffed(call: Call, run: RecordedRun, other: RecordedRun) -> dict[str, Any]:
    code, out, err = call("diff", run.directory, other.directory, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_a_run_does_not_differ_from_its_copy(
    recorded: RecordedRun, copy: RecordedRun, call: Call
) -> None:
    result = diffed(call, recorded, copy)
    assert (result["config"], result["made_of"], result["partings"]) == ({}, {}, [])
    assert result["compared"]["trajectory"] > 200
    code, out, _ = call("diff", recorded.directory, copy.directory)
    assert code == 0
    assert out.startswith("no difference in ")


def test_a_planted_trajectory_is_the_first_record(
    recorded: RecordedRun, copy: RecordedRun, call: Call
) -> None:
    with Tamper(copy) as log:
        name = damage.forge_evaluation(log)
    result = diffed(call, recorded, copy)
    assert [(row["kind"], row["name"]) for row in result["partings"]] == [("trajectory", name)]
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
