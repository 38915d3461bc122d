"""Tests of commands whose console is closed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dora_pipe.core.errors import ResourceError
from dora_pipe.core.system.durable import need_temporary_folder

OUTLASTS = """
import os, signal, sys
from pathlib import Path
from dora_pipe.core.system.console import outlasting, say
with outlasting(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGHUP)
    for line in ("first", "second", "third"):
        say(line)
say("behind it")
"""
MAIN = "from dora_pipe.cli.main import main; main()"
LOST = {"reader": "Broken pipe", "disk": "No space left on device"}


def closed_pipe() -> int:
    read, write = os.pipe()
    os.close(read)
    return write


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lost", LOST)
def test_talk_continues_in_a_file_when_the_console_takes_no_more(
    lost: str, unbuffered: str, tmp_path: Path
) -> None:
    log = tmp_path / "logs" / "run.log"
    console = closed_pipe() if lost == "reader" else os.open("/dev/full", os.O_WRONLY)
    words = [sys.executable, "-c", OUTLASTS, str(log)]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    assert subprocess.run(words, stderr=console, env=environment).returncode == 0
    os.close(console)
    lines = log.read_text().splitlines()
    assert f"the console accepts no more lines ({LOST[lost]}); they continue here" in lines
    assert [line for line in lines if "console" not in line][-3:] == [
        "second",
        "third",
        "behind it",
    ]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["config", "config.toml"]])
def test_command_whose_reader_has_left_ends_in_order(
    words: list[str], unbuffered: str, tmp_path: Path
) -> None:
    text = '[run]\nname = "small"\nsteps = 2\n[model]\npath = "m"\n[task]\nkind = "arithmetic"\n'
    (tmp_path / "config.toml").write_text(text)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    pipe = closed_pipe()
    command = [sys.executable, "-c", MAIN, *words]
    ended = subprocess.run(
        command, stdout=pipe, stderr=subprocess.PIPE, env=environment, cwd=tmp_path
    )
    os.close(pipe)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_missing_temporary_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    need_temporary_folder()
    monkeypatch.setattr(tempfile, "gettempdir", none)
    with pytest.raises(ResourceError, match=r"no writable temporary folder: .*/tmp") as caught:
        need_temporary_folder()
    assert "TMPDIR" in str(caught.value.hint)
