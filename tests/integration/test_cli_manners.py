"""What the command line says to bad input: one line, a hint, a named exit code, nothing lost."""

from __future__ import annotations

import json
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dora_pipe.bus.port import Append, TopicSpec
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.cli import main as cli
from dora_pipe.cli.app import BENCHES, COMMANDS, app
from dora_pipe.core.console import typed

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
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a configuration whose model is not there."""
    (tmp_path / "config.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Command:
    """Calls the command line in this process and keeps what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.out = self.err = ""

    def __call__(self, *words: str) -> int:
        """The exit code of `dora-pipe WORDS`."""
        self._monkeypatch.setattr(sys, "argv", ["dora-pipe", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        self.out, self.err = self._capsys.readouterr()
        return code


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def assert_one_line_and_hint(err: str, line: str, hint: str) -> None:
    """stderr is exactly an error that matches and a hint that matches."""
    lines = err.strip().splitlines()
    assert len(lines) == 2, err
    assert re.search(line, lines[0].removeprefix("error: "))
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert re.search(hint, lines[1])


def test_unknown_key_is_named_with_the_nearest_one(place: Path, command: Command) -> None:
    (place / "config.toml").write_text(CONFIG + "[trainer]\nlearning_rte = 1e-4\n")
    assert command("run", "config.toml") == 3
    assert_one_line_and_hint(command.err, "trainer.learning_rte", "learning_rate")
    assert not (place / "runs" / "small" / "config.toml").exists()


def test_unknown_key_of_an_override_is_an_error_too(place: Path, command: Command) -> None:
    assert command("config", "show", "config.toml", "-o", "run.stepz=3") == 3
    assert_one_line_and_hint(command.err, "run.stepz", "run.steps")


def test_missing_configuration_is_one_line(place: Path, command: Command) -> None:
    assert command("run", "nowhere.toml") == 3
    assert "nowhere.toml" in command.err
    assert "Traceback" not in command.err


def test_missing_model_stops_before_anything_starts(place: Path, command: Command) -> None:
    assert command("run", "config.toml") == 9
    assert "model" in command.err
    assert "Traceback" not in command.err
    assert not (place / "runs" / "small" / "config.toml").exists()


def test_unknown_run_is_answered_with_those_there_are(place: Path, command: Command) -> None:
    (place / "runs" / "other").mkdir(parents=True)
    (place / "runs" / "other" / "config.toml").write_text(CONFIG)
    for words in (("audit", "nope"), ("cat", "nope"), ("show", "nope", "7"), ("topics", "nope")):
        assert command(*words) == 2
        assert_one_line_and_hint(command.err, f"no run 'nope' in {place / 'runs'}", "other")


def test_a_folder_of_the_same_name_does_not_hide_a_run(place: Path, command: Command) -> None:
    for folder in (place / "small", place / "runs" / "small"):
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(CONFIG)
    bus = SqliteBus(place / "runs" / "small" / "log.sqlite")
    bus.create([TopicSpec(name="small.control")])
    bus.close()
    assert command("cat", "small") == 0
    assert command("cat", "./small") == 2
    assert_one_line_and_hint(command.err, "no log", "dora-pipe run small/config.toml")
    assert not (place / "small" / "log.sqlite").exists()


def test_a_run_that_exists_is_never_overwritten(place: Path, command: Command) -> None:
    directory = place / "runs" / "small"
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(CONFIG)
    (directory / "log.sqlite").write_bytes(b"precious")
    assert command("run", "config.toml") == 3
    assert_one_line_and_hint(command.err, "'small' exists", "--resume")
    assert (directory / "log.sqlite").read_bytes() == b"precious"


def test_resume_without_a_run_is_refused(place: Path, command: Command) -> None:
    assert command("run", "config.toml", "--resume") == 2
    assert_one_line_and_hint(command.err, f"no run 'small' in {place / 'runs'}", "DORA_PIPE_RUNS")


def test_a_log_that_is_something_else_is_a_bus_error(place: Path, command: Command) -> None:
    directory = place / "runs" / "small"
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(CONFIG)
    (directory / "log.sqlite").write_bytes(b"this is no database, but long enough to look at" * 50)
    assert command("audit", "small") == 4
    assert "Traceback" not in command.err
    assert len(command.err.strip().splitlines()) <= 2


def test_init_does_not_touch_a_folder_that_is_there(place: Path, command: Command) -> None:
    (place / "mine").mkdir()
    assert command("init", "mine") == 2
    assert_one_line_and_hint(command.err, "mine exists", "name a folder")
    assert list((place / "mine").iterdir()) == []


def test_warm_start_without_a_model_is_one_line(place: Path, command: Command) -> None:
    assert command("sft", "config.toml", "warm") == 9
    assert_one_line_and_hint(command.err, "no model directory", "model.path")
    assert not (place / "warm").exists()


def test_from_needs_a_run_and_a_step(place: Path, command: Command) -> None:
    assert command("run", "config.toml", "--from", "demo") == 2
    assert_one_line_and_hint(command.err, "not RUN@STEP", "demo@40")
    assert command("run", "config.toml", "--from", "demo@1", "--resume") == 2


def test_resolved_configuration_is_printed_to_stdout_and_can_be_read_again(
    place: Path, command: Command
) -> None:
    assert command("config", "show", "config.toml", "-o", "run.steps=7") == 0
    assert command.err == ""
    (place / "again.toml").write_text(command.out)
    first = command.out
    assert command("config", "show", "again.toml") == 0
    assert command.out == first
    assert "steps = 7" in first


def test_doctor_names_what_is_there_and_a_log_that_cannot_be_opened(
    place: Path, command: Command
) -> None:
    assert command("doctor") == 0
    assert "crc32c" in command.out
    (place / "garbage.sqlite").write_bytes(b"no database" * 100)
    assert command("doctor", "--bus", f"sqlite:{place / 'garbage.sqlite'}", "--json") == 1
    assert '"fail"' in command.out


def test_what_a_user_tells_a_run_lies_in_its_control_topic(place: Path, command: Command) -> None:
    directory = place / "runs" / "small"
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(CONFIG)
    bus = SqliteBus(directory / "log.sqlite")
    bus.create([TopicSpec(name="small.control")])
    bus.close()
    assert command("tell", "small", "set", "staleness.max_staleness=3", "run.steps=9") == 0
    assert command("tell", "small", "drain", "worker=w1") == 0
    assert command("cat", "small", "--json") == 0
    records = [json.loads(line)["record"] for line in command.out.splitlines()]
    assert [one["verb"] for one in records] == ["set", "drain"]
    assert records[0]["args"] == {"staleness.max_staleness": 3, "run.steps": 9}
    assert records[1]["args"] == {"worker": "w1"}

    assert command("tell", "small", "dance") == 2
    assert_one_line_and_hint(command.err, "no verb 'dance'", "drain, fail-batch")
    assert command("tell", "small", "set", "groups.size=3") == 2
    assert_one_line_and_hint(command.err, "groups.size", "staleness.max_staleness")
    assert command("tell", "small", "pause", "now=true") == 2
    assert_one_line_and_hint(command.err, "pause", "takes nothing")


def test_every_command_is_where_it_is_said_to_be_and_has_help_of_a_full_sentence(
    command: Command,
) -> None:
    names: list[tuple[str, ...]] = [(one,) for panel in COMMANDS.values() for one in panel]
    names += [("bench", name) for panel in BENCHES.values() for name in panel]
    names += [("config", "show"), ("sim", "paper")]
    assert command("--help") == 0
    listed = command.out
    for name in names:
        assert command(*name, "--help") == 0
        assert re.search(r"^\s*[A-Z][^\n]{15,}", command.out, re.MULTILINE), name
        assert len(name) > 1 or re.search(rf"^  {name[0]}  ", listed, re.MULTILINE), name


def test_what_each_command_does_stands_on_one_line_of_the_list(command: Command) -> None:
    for words, panels in ((("--help",), COMMANDS), (("bench", "--help"), BENCHES)):
        assert command(*words) == 0
        for panel in panels.values():
            for name, (_, what) in panel.items():
                assert re.search(rf"^  {name}  +{re.escape(what)}$", command.out, re.MULTILINE)


def test_init_makes_what_config_show_accepts(place: Path, command: Command) -> None:
    pytest.importorskip("torch")
    assert command("init", "mine", "--task", "calculator") == 0
    assert "next: dora-pipe sft" in command.err
    assert command("config", "show", "mine/config.toml") == 0
    assert (place / "mine" / "model" / "tokenizer.json").is_file()


def _log_of_small(runs: Path) -> None:
    """A run `small` there, with a log and nothing in it."""
    (runs / "small").mkdir(parents=True)
    (runs / "small" / "config.toml").write_text(CONFIG)
    with closing(SqliteBus(runs / "small" / "log.sqlite")) as bus:
        bus.create([TopicSpec(name="small.control")])


def test_runs_lie_where_the_option_or_the_environment_says(
    place: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    _log_of_small(place / "elsewhere")
    assert command("cat", "small") == 2
    assert command("cat", "small", "--runs", "elsewhere") == 0
    monkeypatch.setenv("DORA_PIPE_RUNS", str(place / "elsewhere"))
    assert command("cat", "small") == 0
    assert command("cat", "smal") == 2
    assert_one_line_and_hint(command.err, f"no run 'smal' in {place}/elsewhere", "small")
    assert command("cat", "small", "--runs", "runs") == 2


def test_cat_shows_a_foreign_record_whatever_its_key_and_value_are(
    place: Path, command: Command
) -> None:
    _log_of_small(place / "runs")
    with closing(SqliteBus(place / "runs" / "small" / "log.sqlite")) as bus:
        (name,) = bus.topics()
        value = b'{"kind":"\x1b[2J\xff"}'
        bus.writer().append([Append(topic=name, key=b"\xff\x1b]0;x\x07", value=value)])
    assert command("cat", "small") == 0
    assert "\\xff\\x1b]0;x\\x07" in command.out
    assert command.out.rstrip("\n").isprintable()
    assert command("cat", "small", "--json", "--key", "\\xff\x1b]0;x\x07") == 0
    assert json.loads(command.out)["record"]["kind"] == "unreadable"


def test_near_names_come_first_and_not_all_of_many_are_named(place: Path, command: Command) -> None:
    for name in ("demo-2", *(f"run{number}" for number in range(20))):
        (place / "runs" / name).mkdir(parents=True)
        (place / "runs" / name / "config.toml").write_text(CONFIG)
    assert command("cat", "demo2") == 2
    assert_one_line_and_hint(command.err, "no run 'demo2'", "there are: demo-2, .* and 13 more$")


def test_every_command_that_takes_a_run_takes_where_runs_lie() -> None:
    group: Any = get_command(app)
    benches = group.commands["bench"].commands.items()
    commands = {**group.commands, **{f"bench {name}": one for name, one in benches}}
    taking = {
        name: {option for param in one.params for option in param.opts}
        for name, one in commands.items()
        if name != "up" and any(param.name == "run" for param in one.params)
    }
    assert {"show", "audit", "tell", "archive", "bench moves"} <= set(taking)
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
