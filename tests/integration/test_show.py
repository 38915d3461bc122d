"""`show` as a person reads it: a run, a step on one screen, and nothing that is cut."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.cli.show import (
    METRICS,
    print_evaluations,
    print_step,
    shown_evaluations,
)
from dora_pipe.ledger.evaluations import Evaluated, Interval
from tests.support.command_line import Call, caller
from tests.support.recorded_run import STEPS, RecordedRun


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    return caller(monkeypatch, capsys)


def test_a_run_is_shown_on_one_screen(recorded: RecordedRun, call: Call) -> None:
    code, out, err = call("show", recorded.directory)
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].startswith(f"recorded: finished {STEPS} steps, ")
    assert len(lines) <= 24, out
    texts = {line.split("  ")[0] for line in lines}
    assert {"reward", "staleness", "groups", "trainer", "orchestrator", "w0"} <= texts
    assert any(line.startswith("evaluations, ") for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_run_as_json_has_every_step_and_wait(recorded: RecordedRun, call: Call) -> None:
    code, out, _ = call("show", recorded.directory, "--json")
    result = json.loads(out)
    assert (code, result["run"], result["steps"], len(result["rewards"])) == (
        0,
        "recorded",
        STEPS,
        STEPS,
    )
    assert result["waits"]["roles"][0]["role"] == "trainer"


def test_a_step_fits_a_screen_and_all_of_it_is_there_when_asked_for(
    recorded: RecordedRun, call: Call
) -> None:
    code, out, err = call("show", recorded.directory, "3")
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) <= 24, out
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("step 3 of recorded: ")
    _, full, _ = call("show", recorded.directory, "3", "--json")
    description = json.loads(full)
    assert {row["group"] for row in description["groups"]} == set(re.findall(r"g\d{10}(?!-)", out))
    worst = re.findall(r"^(g\d{10}-\d{3}) ", out, re.MULTILINE)
    assert worst == []  # The trainer of this run says nothing of ratios.
    _, everything, _ = call("show", recorded.directory, "3", "--all")
    assert all(row["trajectory"] in everything for row in description["trajectories"])
    assert "\ntrace\n" in everything


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize("count", [8, 32, 512])
def test_a_step_of_any_size_fits_the_screen(
    count: int, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    print_step(_step(count, versions=3), "x")
    captured = capsys.readouterr()
    assert len((captured.out + captured.err).splitlines()) < 24
    assert "the 3 trajectories with the worst ratios" in captured.out
    named = re.findall(r"g\d{10}(?!-)", captured.out)
    assert 0 < len(named) <= count
    text = f"({len(named)} of {count}; all with --all)"
    assert (text in captured.out) == (len(named) < count)


def _step(count: int, *, versions: int) -> dict[str, Any]:
    groups = [
        {
            "group": f"g{index:010d}",
            "version": index % versions,
            "staleness": versions - index % versions,
            "rewards": "0 1 1 0.5",
            "tokens": 100,
        }
        for index in range(count)
    ]
    rows = [
        {
            "trajectory": f"g{index:010d}-000",
            "ratio_min": 0.1234,
            "ratio_max": 5.678,
            "advantage": -0.9352,
            "clipped_share": 0.02083,
        }
        for index in range(count)
    ]
    return {
        "step": {"step": 3, "attempt": 1, "batch reason": "so", "compute s": 1.0},
        "weights": {"after": f"version 4 {'a' * 64}"},
        "metrics": dict.fromkeys(METRICS, 0.12345),
        "groups": groups,
        "trajectories": rows,
    }


def test_a_run_without_a_step_yet_is_shown(call: Call, tmp_path: Path) -> None:
    from dora_pipe.config.load import dump_toml
    from tests.support.cluster import Cluster, make_config

    config = make_config(run__name="small")
    directory = tmp_path / "small"
    with Cluster(directory, config):
        (directory / "config.toml").write_text(dump_toml(config))
        code, out, err = call("show", str(directory))
    assert code == 0, err
    assert "no step yet" in out


def test_the_worst_ratios_are_those_farthest_from_1_either_way(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ratios = [(0.9, 1.1), (0.01, 1.0), (0.5, 2.5), (None, None), (1.0, 90.0), (0.2, 1.0)]
    rows = [
        {"trajectory": f"g{index:010d}-000", "ratio_min": low, "ratio_max": high}
        for index, (low, high) in enumerate(ratios)
    ]
    print_step(
        {
            "step": {"step": 3, "attempt": 1, "batch reason": "so", "compute s": 1.0},
            "weights": {"after": f"version 4 {'a' * 64}"},
            "metrics": {"loss": 0.5},
            "groups": [{"group": "g0000000000"}],
            "trajectories": rows,
        },
        "x",
    )
    worst = re.findall(r"^(g\d{10})-000", capsys.readouterr().out, re.MULTILINE)
    assert [int(entry[1:]) for entry in worst] == [1, 4, 5]


def test_the_first_the_best_and_the_newest_of_every_evaluation_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def evaluated(version: int, name: str) -> Evaluated:
        best = version == (4 if name == "hard" else 8)
        value = Interval(value=float(best), low=0.0, high=1.0)
        return Evaluated(
            version=version,
            evaluation=name,
            task="",
            prompts=2,
            trajectories=1,
            metrics={"mean@1": value},
        )

    results = [evaluated(version, name) for version in range(9) for name in ("hard", "easy")]
    assert [
        (evaluation.version, evaluation.evaluation) for evaluation in shown_evaluations(results)
    ] == [
        (0, "hard"),
        (0, "easy"),
        (4, "hard"),
        (7, "easy"),
        (8, "hard"),
        (8, "easy"),
    ]
    print_evaluations(results, everything=False)
    assert "; 12 evaluations left out (--all)" in (out := capsys.readouterr().out)
    assert re.findall(r"(\d+) \(best\) +(\w+)", out) == [("4", "hard"), ("8", "easy")]
    print_evaluations(results, everything=True)
    assert "left out" not in (out := capsys.readouterr().out) and out.count("easy") == 9
    half = replace(evaluated(9, "easy"), prompts=1)  # under way
    print_evaluations([*results, half], everything=False)
    assert re.findall(r"(\d+) \(best\) +easy", capsys.readouterr().out) == ["8"]
    once = [evaluated(0, "")]
    assert shown_evaluations(once) == once
    assert shown_evaluations([]) == []
