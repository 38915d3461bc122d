"""Tests of bad input on the command line: one line, a hint, a named exit code, no data loss."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.cli.app import COMMANDS, app
from dora_pipe.core.pure.records import Append
from dora_pipe.core.system.console import typed
from tests.support.command_line import Call

CONFIG = """
[run]
name = "small"
steps = 2
[model]
path = "model"
[task]
kind = "arithmetic"
"""


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def assert_one_line_and_hint(err: str, line: str, hint: str) -> None:
    lines = err.strip().splitlines()
    assert len(lines) == 2, err
    assert re.search(line, lines[0].removeprefix("error: "))
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert re.search(hint, lines[1])


def make_run(folder: Path, log: bytes | None = None) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG)
    if log is not None:
        (folder / "log.sqlite").write_bytes(log)
        return folder
    with closing(SqliteBus(folder / "log.sqlite")) as bus:
        bus.create([TopicSpec(name="small.control"), TopicSpec(name="small.decisions")])
    return folder


@pytest.mark.parametrize(
    ("words", "code", "line", "hint"),
    [
        ("config config.toml -o run.stepz=3", 3, "run.stepz", "run.steps"),
        ("run config.toml -o trainer.learning_rte=1e-4", 3, "learning_rte", "learning_rate"),
        ("run config.toml --resume", 2, "no run 'small' in {place}/runs", "DORA_PIPE_RUNS"),
        ("run config.toml --from demo", 2, "neither RUN@STEP nor", "demo@40"),
        ("init mine", 2, "mine exists", "name a folder"),
        ("sft config.toml warm", 9, "no model directory", "a model.s folder holds|did you mean"),
        ("set small rollout.group_size=3", 2, "rollout.group_size", "staleness.max_staleness"),
    ],
)
def test_what_cannot_be_done_is_one_line_with_a_hint_and_leaves_nothing(
    run_directory: Path, call: Call, words: str, code: int, line: str, hint: str
) -> None:
    (run_directory / "mine").mkdir()
    there = sorted(run_directory.rglob("*"))
    result, _, err = call(*words.split())
    assert result == code
    assert_one_line_and_hint(err, line.format(place=run_directory), hint)
    assert sorted(run_directory.rglob("*")) == there


def test_unknown_key_of_a_file_is_named_with_the_nearest_one(
    run_directory: Path, call: Call
) -> None:
    (run_directory / "config.toml").write_text(CONFIG + "[trainer]\nlearning_rte = 1e-4\n")
    code, _, err = call("run", "config.toml")
    assert code == 3
    assert_one_line_and_hint(err, "trainer.learning_rte", "learning_rate")


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [("run nowhere.toml", 3, "nowhere.toml"), ("run config.toml", 9, "model")],
)
def test_what_is_missing_stops_before_anything_starts(
    run_directory: Path, call: Call, words: str, code: int, named: str
) -> None:
    result, _, err = call(*words.split())
    assert result == code
    assert named in err and "Traceback" not in err
    assert not (run_directory / "runs" / "small" / "config.toml").exists()


def test_unknown_run_is_answered_with_those_there_are(run_directory: Path, call: Call) -> None:
    make_run(run_directory / "runs" / "other", b"")
    for words in (
        ("audit", "nope"),
        ("log", "read", "nope"),
        ("show", "nope", "7"),
        ("log", "topics", "nope"),
    ):
        code, _, err = call(*words)
        assert code == 2
        assert_one_line_and_hint(err, f"no run 'nope' in {run_directory / 'runs'}", "other")


def test_a_folder_of_the_same_name_does_not_hide_a_run(run_directory: Path, call: Call) -> None:
    make_run(run_directory / "runs" / "small")
    (run_directory / "small").mkdir()
    (run_directory / "small" / "config.toml").write_text(CONFIG)
    assert call("log", "read", "small")[0] == 0
    code, _, err = call("log", "read", "./small")
    assert code == 2
    assert_one_line_and_hint(err, "no log", "dora-pipe run small/config.toml")
    assert not (run_directory / "small" / "log.sqlite").exists()


def test_a_run_that_exists_is_never_overwritten(run_directory: Path, call: Call) -> None:
    directory = make_run(run_directory / "runs" / "small", b"precious")
    code, _, err = call("run", "config.toml")
    assert code == 3
    assert_one_line_and_hint(err, "'small' exists", "--resume")
    assert (directory / "log.sqlite").read_bytes() == b"precious"


def test_a_log_that_is_something_else_is_a_bus_error(run_directory: Path, call: Call) -> None:
    make_run(
        run_directory / "runs" / "small", b"this is no database, but long enough to look at" * 50
    )
    code, _, err = call("audit", "small")
    assert code == 4
    assert "Traceback" not in err and len(err.strip().splitlines()) <= 2


def test_resolved_configuration_is_printed_to_stdout_and_can_be_read_again(
    run_directory: Path, call: Call
) -> None:
    code, first, err = call("config", "config.toml", "-o", "run.steps=7")
    assert (code, err) == (0, "")
    assert "steps = 7" in first
    (run_directory / "again.toml").write_text(first)
    assert call("config", "again.toml") == (0, first, "")


def test_doctor_names_what_is_there_and_a_log_that_cannot_be_opened(
    run_directory: Path, call: Call
) -> None:
    code, out, _ = call("doctor")
    assert code == 0 and "deepspeed" in out
    (run_directory / "garbage.sqlite").write_bytes(b"no database" * 100)
    code, out, _ = call("doctor", "--bus", f"sqlite:{run_directory / 'garbage.sqlite'}", "--json")
    assert code == 1 and '"fail"' in out


def test_what_a_user_tells_a_run_lies_in_its_control_topic(run_directory: Path, call: Call) -> None:
    make_run(run_directory / "runs" / "small")
    assert call("set", "small", "staleness.max_staleness=3", "run.steps=9")[0] == 0
    assert call("control", "drain", "small", "w1")[0] == 0
    records = [
        json.loads(line)["record"]
        for line in call("log", "read", "small", "--json")[1].split("\n")[:-1]
    ]
    assert [(record["verb"], record["args"]) for record in records] == [
        ("set", {"staleness.max_staleness": 3, "run.steps": 9}),
        ("drain", {"worker": "w1"}),
    ]


def test_what_each_command_does_stands_on_one_line_of_the_list(call: Call) -> None:
    code, out, _ = call("--help")
    assert code == 0
    for panel in COMMANDS.values():
        for name, (_, what, *_) in panel.items():
            assert re.search(rf"^  {name}  +{re.escape(what)}$", out, re.MULTILINE)


def test_init_makes_what_config_accepts(run_directory: Path, call: Call) -> None:
    pytest.importorskip("torch")
    code, _, err = call("init", "mine", "--task", "calculator")
    assert code == 0 and "next: dora-pipe sft" in err
    assert call("config", "mine/config.toml")[0] == 0
    assert (run_directory / "mine" / "model" / "tokenizer.json").is_file()


def test_runs_lie_where_the_option_or_the_environment_says(
    run_directory: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(run_directory / "elsewhere" / "small")
    assert call("log", "read", "small")[0] == 2
    assert call("log", "read", "small", "--runs", "elsewhere")[0] == 0
    monkeypatch.setenv("DORA_PIPE_RUNS", str(run_directory / "elsewhere"))
    assert call("log", "read", "small")[0] == 0
    code, _, err = call("log", "read", "smal")
    assert code == 2
    assert_one_line_and_hint(err, f"no run 'smal' in {run_directory}/elsewhere", "small")
    assert call("log", "read", "small", "--runs", "runs")[0] == 2


def test_cat_shows_a_foreign_record_whatever_its_key_and_value_are(
    run_directory: Path, call: Call
) -> None:
    make_run(run_directory / "runs" / "small")
    with closing(SqliteBus(run_directory / "runs" / "small" / "log.sqlite")) as bus:
        name = "small.control"
        value = b'{"kind":"\x1b[2J\xff"}'
        bus.writer().append([Append(topic=name, key=b"\xff\x1b]0;x\x07", value=value)])
    code, out, _ = call("log", "read", "small")
    assert code == 0
    assert "\\xff\\x1b]0;x\\x07" in out
    assert out.rstrip("\n").isprintable()
    code, out, _ = call("log", "read", "small", "--json", "--key", "\\xff\x1b]0;x\x07")
    assert (code, json.loads(out)["record"]["kind"]) == (0, "unreadable")


def test_near_names_come_first_and_not_all_of_many_are_named(
    run_directory: Path, call: Call
) -> None:
    for name in ("demo-2", *(f"run{number}" for number in range(20))):
        make_run(run_directory / "runs" / name, b"")
    code, _, err = call("log", "read", "demo2")
    assert code == 2
    assert_one_line_and_hint(err, "no run 'demo2'", "there are: demo-2, .* and 13 more$")


def test_every_command_that_takes_a_run_takes_where_runs_lie() -> None:
    group: Any = get_command(app)
    taking = {
        name: {option for param in command.params for option in param.opts}
        for name, command in group.commands.items()
        if any(param.name == "run" for param in command.params)
    }
    assert {"show", "audit", "set"} <= set(taking)
    assert [name for name, options in taking.items() if "--runs" not in options] == []


def test_hints_repeat_where_runs_lie_unless_the_environment_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert typed("show", "demo") == "dora-pipe show demo"
    assert typed("run", "a b", "--resume", runs=Path("x y")) == (
        "dora-pipe run 'a b' --resume --runs 'x y'"
    )
    monkeypatch.setenv("DORA_PIPE_RUNS", "x")
    assert typed("show", "demo", runs=Path("x")) == "dora-pipe show demo"
    assert typed("show", "demo", runs=Path("runs")) == "dora-pipe show demo --runs runs"
