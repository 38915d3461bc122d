"""`audit`, `replay`, `export` and `show` as a user calls them: what is printed, how they end."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dora_pipe.analysis import replay
from dora_pipe.cli import replay as replay_command
from dora_pipe.cli.show import _errors
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.producers.engines.simulated import END_TOKEN, SimulatedEngine
from dora_pipe.schemas.control import error_class
from dora_pipe.store.safetensors_file import read_manifest
from tests.support import damage
from tests.support.command_line import Call, caller
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.tamper import Tamper


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    monkeypatch.setattr(replay, "make_learner", lambda **_: SimulatedLearner())
    monkeypatch.setattr(replay_command, "open_engine", _engine)
    monkeypatch.setattr(replay_command, "Tokenizer", _NoTokenizer)
    return caller(monkeypatch, capsys)


class _NoTokenizer:
    stop_ids = (END_TOKEN,)

    def __init__(self, assets: Path) -> None:
        assert assets.is_dir()

    def full_text(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))

    text = full_text


def _engine(*, assets: Path, config: Any, decode: Any) -> SimulatedEngine:
    return SimulatedEngine(
        slots=config.workers.max_num_seqs, context_tokens=config.workers.max_model_len
    )


def test_clean_run_is_proved_with_exit_code_0(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("audit", str(recorded.directory))
    assert code == 0, err
    assert "C2: outcome of every dispatched group" in out
    assert "BROKEN" not in out
    assert out.count(" ok") == 10
    assert re.fullmatch(r"holds: 0 violations in [\d,]+ records", out.splitlines()[-1])


def test_broken_run_is_named_with_exit_code_5(copy: RecordedRun, call: Call) -> None:
    with Tamper(copy) as log:
        name = damage.change_reward(log)
    code, out, err = call("audit", str(copy.directory))
    assert code == 5
    assert err.startswith("error: ")
    assert name in out
    assert "BROKEN" in out
    assert out.splitlines()[-1].startswith("violated: ")


def test_json_report_is_one_object(call: Call, recorded: RecordedRun) -> None:
    code, out, _ = call("audit", str(recorded.directory), "--json")
    assert code == 0
    report = json.loads(out)
    assert report["holds"] is True
    assert report["violations"] == []
    assert report["dispatched"] == sum(line["groups"] for line in report["outcomes"])
    assert sum(report["staleness"].values()) == STEPS * 4
    assert report["staleness_max"] <= report["staleness_bound"] == 2
    assert report["not_declared"] == {}


def test_broken_json_report_names_every_violation(copy: RecordedRun, call: Call) -> None:
    with Tamper(copy) as log:
        name = damage.remove_trajectory(log)
    code, out, _ = call("audit", str(copy.directory), "--json")
    assert code == 5
    (violation,) = json.loads(out)["violations"]
    assert violation["check"] == "records"
    assert violation["subject"] == name


def test_policies_may_be_left_out(copy: RecordedRun, call: Call) -> None:
    with Tamper(copy) as log:
        damage.change_weights(log)
    assert call("audit", str(copy.directory))[0] == 5
    code, out, _ = call("audit", str(copy.directory), "--no-store")
    assert code == 0
    assert "policy files were not looked at" in out


def test_steps_are_replayed_with_a_line_each(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("replay", str(recorded.directory), "--from", "7", "--to", "9")
    assert code == 0, err
    lines = out.splitlines()
    assert [line.split()[1] for line in lines] == ["6", "7", "8"]
    assert "(prefix)" in lines[0]
    assert "2 of 2 steps bit-equal" in err


def test_without_bounds_every_step_is_replayed(call: Call, recorded: RecordedRun) -> None:
    code, out, _ = call("replay", str(recorded.directory), "--json")
    assert code == 0
    steps = [json.loads(line) for line in out.splitlines()]
    assert [step["step"] for step in steps] == list(range(STEPS))
    assert all(step["equal"] and step["digest_replayed"] for step in steps)


def test_steps_are_retrained_into_a_directory(
    call: Call, recorded: RecordedRun, tmp_path: Path
) -> None:
    words = ("retrain", str(recorded.directory), "--out", str(tmp_path / "out"), "--to", "3")
    code, out, err = call(*words, "--set", "trainer.learning_rate=1.1e-5")
    assert code == 0, err
    assert "first step with other weights than the source's: 0" in out
    assert (tmp_path / "out" / "model.safetensors").is_file()
    code, _, err = call(*words)
    assert (code, "holds a retrained model" in err) == (2, True)


@pytest.mark.parametrize("change", ["trainer.learning_rate", "run.steps=4", "trainer.x=[1]"])
def test_setting_that_cannot_be_is_refused(
    call: Call, recorded: RecordedRun, tmp_path: Path, change: str
) -> None:
    out = str(tmp_path / "out")
    assert call("retrain", str(recorded.directory), "--out", out, "--set", change)[0] in (2, 3)


def test_random_trajectories_are_generated_again(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("replay", str(recorded.directory), "--random", "20", "--seed", "4")
    assert code == 0, err
    assert len(out.splitlines()) == 20
    assert all(line.endswith("equal") for line in out.splitlines())
    assert "20 of 20 trajectories bit-equal" in err


def test_changed_trajectory_ends_with_exit_code_6(copy: RecordedRun, call: Call) -> None:
    with Tamper(copy) as log:
        name = damage.forge_everything(log)
    code, out, err = call("replay", str(copy.directory), name, "g0000000001-000")
    assert code == 6
    assert [line.split()[0] for line in out.splitlines()] == ["g0000000001-000", name]
    assert f"error: {name}: token" in err


def test_two_kinds_of_replay_do_not_mix(call: Call, recorded: RecordedRun) -> None:
    args = ("--random", "2", "--from", "1")
    assert call("replay", str(recorded.directory), *args)[0] == 2


def test_trajectories_are_exported(call: Call, recorded: RecordedRun, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    code, out, err = call("export", "parquet", str(recorded.directory), str(path))
    assert (code, out) == (0, "")
    assert f"{pq.read_metadata(path).num_rows} trajectories" in err


def test_policy_is_exported(call: Call, recorded: RecordedRun, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    code, _, err = call("export", "policy", str(recorded.directory), "3", str(folder))
    assert code == 0
    assert "version 3, weights " in err
    assert (folder / "model.safetensors").is_file()


def test_exported_policy_says_where_it_comes_from_and_names_no_place(
    call: Call, recorded: RecordedRun, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    assert call("export", "policy", str(recorded.directory), "3", str(folder))[0] == 0
    card = (folder / "README.md").read_text()
    digest = read_manifest(folder / "model.safetensors").digest
    assert f"| weights | `{digest}` |" in card
    assert "--from 2 --to 3" in card and "objective.kind" in card and "| loss |" in card
    assert str(recorded.directory.parent) not in card and str(Path.home()) not in card
    generation = json.loads((folder / "generation_config.json").read_bytes())
    assert generation["do_sample"] is True and generation["max_new_tokens"] > 0


def test_best_policy_is_that_of_the_best_logged_evaluation_without_a_key(
    call: Call, recorded: RecordedRun, tmp_path: Path
) -> None:
    shown = json.loads(call("show", str(recorded.directory), "--json")[1])
    means = {row["version"]: row["metrics"]["mean@1"]["value"] for row in shown["evaluations"]}
    code, _, err = call("export", "policy", str(recorded.directory), "best", str(tmp_path / "m"))
    assert code == 0
    best = max(means, key=lambda version: (means[version], -version))
    assert f"best: version {best}, {means[best]:.3f} in evaluation" in err


@pytest.mark.parametrize("args", [("parquet",), ("policy", "3"), ("policy", "no number")])
def test_export_names_the_argument_that_is_missing(
    call: Call, recorded: RecordedRun, args: tuple[str, ...]
) -> None:
    kind, *rest = args
    code, _, err = call("export", kind, str(recorded.directory), *rest)
    assert code == 2
    assert "Missing argument" in err


@pytest.mark.parametrize("name", ["g0000000010-001", "g0000000010", "6"])
def test_story_is_printed_and_given_as_json(call: Call, recorded: RecordedRun, name: str) -> None:
    code, out, err = call("show", str(recorded.directory), name, "--all")
    assert code == 0, err
    assert "lineage" in out
    code, out, _ = call("show", str(recorded.directory), name, "--json")
    assert code == 0
    assert "lineage" in json.loads(out)


def test_trajectories_without_a_reward_are_told_apart_by_whose_fault_it_is(
    call: Call, recorded: RecordedRun
) -> None:
    code, out, _ = call("show", str(recorded.directory), "--json")
    assert (code, list(json.loads(out)["errors"])) == (0, ["ValueError"])
    _, out, _ = call("show", str(recorded.directory))
    (line,) = [line for line in out.splitlines() if line.startswith("no reward")]
    assert "code: " in line and "ValueError" in line
    errors = ("KeyError: 'x'", "not scored: TimedOut: timed out", "Retry: busy", "NoAnswer: a dict")
    assert _errors(Counter(map(error_class, errors))) == (
        "infrastructure: 1 TimedOut, 1 Retry; answer: 1 NoAnswer; code: 1 KeyError"
    )


def test_unknown_id_is_refused(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("show", str(recorded.directory), "g0000099999")
    assert (code, out) == (2, "")
    assert "hint: " in err


@pytest.mark.parametrize(
    ("key", "there", "forged", "state"),
    [
        ("sampling.temperature", "temperature = 1.0", "temperature = 0.5", "fail"),
        ("trainer.max_grad_norm", "max_grad_norm = 1.0", "max_grad_norm = 2.0", "note"),
        ("timing.heartbeat_s", "heartbeat_s = 0.1", "heartbeat_s = 0.2", "ok"),
    ],
)
def test_config_file_that_is_not_the_logged_one_is_named_by_show_and_doctor(
    copy: RecordedRun, call: Call, key: str, there: str, forged: str, state: str
) -> None:
    file = copy.directory / "config.toml"
    text = file.read_text()
    assert there in text
    file.write_text(text.replace(there, forged, 1))
    code, _, err = call("show", str(copy.directory), "7")
    assert code == 0
    assert (f"{key} is" in err) == (state != "ok"), err
    for location in (copy.directory, file):
        _, out, _ = call("doctor", "--config", str(location), "--json")
        (row,) = [row for row in map(json.loads, out.splitlines()) if row["what"] == "config.toml"]
        assert row["state"] == state
        assert (f"{key} is" in row["detail"]) == (state != "ok")


def test_what_an_audit_cannot_see_is_said_and_stands_in_the_docs(
    call: Call, recorded: RecordedRun
) -> None:
    _, out, _ = call("audit", str(recorded.directory), "--json")
    unseen = json.loads(out)["cannot_see"]
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()
    assert unseen and [line for line in unseen if line not in page] == []
    _, out, _ = call("audit", str(recorded.directory))
    assert "outside the scope of audit" in out
