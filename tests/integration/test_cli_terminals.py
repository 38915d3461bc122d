"""The command line where a terminal takes no more than ASCII, and where Ctrl-C comes at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from dora_pipe.cli.main import EXIT_INTERRUPTED
from dora_pipe.config.describe import dump_toml, toml
from dora_pipe.config.load import load_config
from dora_pipe.core.pure.records import Append
from dora_pipe.launch.examples import example_file
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.wire import encode
from tests.support.command_line import Call
from tests.support.recorded_run import RecordedRun

LIMIT_S = 60
RUN_MAIN = "from dora_pipe.cli.main import main; main()"

INTERRUPTED_WHILE_IMPORTING = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
        return None

sys.meta_path.insert(0, Interrupt())
from dora_pipe.cli.main import main
main()
"""


HOSTILE = "\x1b[31m\x9b31m\x07\u202e na\u00efve \U0001f600"


@pytest.mark.parametrize(("encoding", "as_json"), [("utf-8", False), ("ascii", True)])
def test_configuration_is_shown_as_what_it_is_with_nothing_that_steers_a_terminal(
    encoding: str, as_json: bool, tmp_path: Path
) -> None:
    given = load_config(example_file("arithmetic"), [f"task.options={toml({HOSTILE: HOSTILE})}"])
    file = tmp_path / "a.toml"
    file.write_text(dump_toml(given))
    words = [str(file), "--json"] if as_json else [str(file)]
    done = subprocess.run(
        [sys.executable, "-c", RUN_MAIN, "config", *words],
        env={**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        encoding=encoding,
        timeout=LIMIT_S,
        check=True,
    )
    assert all(line.isprintable() for line in done.stdout.splitlines())
    read = json.loads(done.stdout) if as_json else tomllib.loads(done.stdout)
    assert read["task"]["options"] == {HOSTILE: HOSTILE}


@pytest.mark.parametrize(
    "words",
    [
        [HOSTILE],
        ["show", HOSTILE],
        ["show", "a", f"--{HOSTILE}"],
        ["run", HOSTILE],
        ["config", HOSTILE],
        ["config", str(example_file("arithmetic")), "-o", f"{HOSTILE}=1"],
        ["config", str(example_file("arithmetic")), "-o", f"run.name={HOSTILE}"],
        ["set", "a", HOSTILE],
    ],
)
def test_words_that_steer_a_terminal_are_refused_as_text(words: list[str], call: Call) -> None:
    code, out, err = call(*words)
    assert code in (2, 3)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out + err)


@pytest.mark.parametrize("words", [("log", "read", "."), ("log", "read", ".", "--json")])
def test_command_shows_what_ascii_cannot_say(
    words: tuple[str, ...], recorded: RecordedRun, tmp_path: Path
) -> None:
    copy = recorded.copy(tmp_path / "recorded")
    bus = copy.open()
    command = Command(at_ns=0, user="j\u00fcrgen", verb="pause")
    bus.writer().append([Append(topic=copy.topics.control, value=encode(command))])
    bus.close()
    done = subprocess.run(
        [sys.executable, "-c", RUN_MAIN, *words],
        cwd=copy.directory,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert done.stdout.isascii()


@pytest.mark.parametrize("module", ["dora_pipe.cli.app", "dora_pipe.cli.show"])
def test_ctrl_c_while_the_commands_are_imported_is_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_WHILE_IMPORTING.format(module=module), "show"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (EXIT_INTERRUPTED, "interrupted\n")


def test_nothing_slow_is_imported_before_ctrl_c_is_a_line() -> None:
    names = "{'typer', 'rich', 'pyarrow', 'msgspec', 'numpy', 'importlib.metadata', 'email'}"
    code = f"import sys, dora_pipe.cli.main; sys.exit(len({names} & sys.modules.keys()))"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, timeout=LIMIT_S).returncode == 0
    )
