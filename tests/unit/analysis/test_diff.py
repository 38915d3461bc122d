"""Tests of diff: first different record and its cause."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.analysis.diff import ComparedRun, Kind, Records, compare, in_folder
from dora_pipe.cli.diff import print_diff

NAME = "g0000000003-001"
RATE = "trainer.learning_rate"
GROUPS: Records = {0: (10, "row 0 under version 0"), 1: (40, "row 1 under version 1")}
VERSIONS: Records = {0: (0, "a"), 1: (30, "b"), 2: (60, "c")}
TRAJECTORIES: Records = {NAME: (20, (("a", 3), "tokens", 1.0))}


def run(**changes: Any) -> ComparedRun:
    records: dict[Kind, Records] = {
        "group": GROUPS,
        "version": VERSIONS,
        "trajectory": TRAJECTORIES,
    }
    records |= changes.pop("records", {})
    given: Mapping[str, Any] = {"config": {RATE: 0.1}, "made_of": {"seed": 7}, **changes}
    return ComparedRun(records=records, **{"changes": [], **given})


def test_the_first_record_is_the_earliest_of_those_that_differ() -> None:
    assert not compare(run(), run()).partings
    other = run(
        records={
            "group": {**GROUPS, 1: (41, "row 5 under version 1")},
            "version": {**VERSIONS, 1: (31, "x"), 2: (61, "y")},
        }
    )
    comparison = compare(run(), other)
    assert [(parting.kind, parting.name) for parting in comparison.partings] == [
        ("version", "1"),
        ("group", "1"),
    ]
    assert comparison.partings[0].values == ("b", "x")


def test_a_shorter_run_does_not_differ_and_other_weights_are_not_compared() -> None:
    shorter: dict[Kind, Records] = {
        "version": {0: (0, "a")},
        "trajectory": {NAME: (20, (("b", 3), "other tokens", 0.0))},
    }
    comparison = compare(run(), run(records=shorter))
    assert not comparison.partings
    assert comparison.compared == {"group": 2, "version": 1, "trajectory": 0}


def test_a_setting_that_changed_in_mid_run_is_the_first_reason() -> None:
    raised = [(21, f"{RATE} 0.1 -> 0.2")]
    comparison = compare(run(), run(changes=raised, config={RATE: 0.1, "run.name": "b"}))
    assert comparison.reasons(("a", "b")) == [f"b changed {RATE} 0.1 -> 0.2 at step 21"]
    both = compare(run(changes=raised), run(changes=raised, made_of={"seed": 8}))
    assert both.reasons(("a", "b")) == ["seed: 7 and 8"]


@pytest.mark.parametrize(
    ("value", "shown"),
    [("/runs/a/start/warm", "start/warm"), ("/runs/ab/warm", "/runs/ab/warm"), (0.1, 0.1)],
)
def test_paths_in_the_folders_of_two_runs_are_equal(value: Any, shown: Any) -> None:
    assert in_folder(value, Path("/runs/a")) == shown


def test_a_batch_names_the_groups_that_the_other_run_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = {"batch": {0: (10, "g0000000001 g0000000002 g0000000003 g0000000004")}}
    other = {"batch": {0: (10, "g0000000001 g0000000002 g0000000003 g0000000005")}}
    print_diff(compare(run(records=first), run(records=other)), ("a", "b"))
    line = "first record   batch 0: with g0000000004 | with g0000000005"
    assert capsys.readouterr().out.splitlines()[0] == line
