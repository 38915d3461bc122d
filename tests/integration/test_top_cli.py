"""Tests of `top` in two terminal sizes, without color, in a pipe and on a live run."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import sqlite3
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.support.command_line import Call
from tests.support.recorded_run import STEPS, RecordedRun

LIMIT_S = 60.0
READ_BYTES = 65536

ESCAPE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9])")
COLOUR = re.compile(r"\x1b\[(?:[0-9]+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;[0-9]+)*m")
OUT = "import sys; sys.argv[0] = 'dora-pipe'; from dora_pipe.cli.main import main; main()"
SIZES = [(80, 24), (200, 60)]
TITLES = ("workers", "run", "waits", "last decisions")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    code: int
    text: str

    @property
    def rows(self) -> list[str]:
        return [line.rstrip() for line in ESCAPE.sub("", self.text).replace("\r", "").split("\n")]


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **more}


def in_terminal(
    words: Sequence[object],
    *,
    columns: int,
    rows: int,
    interrupt_at: str = "",
    env: Mapping[str, str] | None = None,
) -> Shown:
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", OUT, *map(str, words)],
        stdin=there,
        stdout=there,
        stderr=there,
        env=dict(env or environment()),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(there)
    try:
        text = _read(here, interrupt_at)
        return Shown(code=child.wait(LIMIT_S), text=text)
    finally:
        child.kill()
        child.wait()
        os.close(here)


def _read(terminal: int, interrupt_at: str) -> str:
    source, pressed, until = b"", not interrupt_at, time.monotonic() + LIMIT_S
    while True:
        left_s = until - time.monotonic()
        assert left_s > 0, f"not done within {LIMIT_S} s: {source[-2000:]!r}"
        if not select.select([terminal], [], [], left_s)[0]:
            continue
        try:
            piece = os.read(terminal, READ_BYTES)
        except OSError:  # What Linux says when the other end is closed.
            piece = b""
        if not piece:
            return source.decode("utf-8", "replace")
        source += piece
        if not pressed and interrupt_at in ESCAPE.sub("", source.decode("utf-8", "replace")):
            os.write(terminal, b"\x03")
            pressed = True


@pytest.fixture
def open_run(recorded: RecordedRun, tmp_path: Path) -> RecordedRun:
    result = recorded.copy(tmp_path / "recorded")
    with closing(sqlite3.connect(result.log)) as log, log:
        last = log.execute(
            "SELECT max(at) FROM log WHERE topic = ?", (result.topics.decisions,)
        ).fetchone()
        log.execute("DELETE FROM records WHERE at = ?", last)
    return result


@pytest.fixture(scope="module", params=SIZES)
def frame(request: pytest.FixtureRequest, recorded: RecordedRun) -> tuple[Shown, int, int]:
    columns, rows = request.param
    words = ["top", recorded.directory, "--once"]
    return in_terminal(words, columns=columns, rows=rows), columns, rows


def test_frame_fits_the_terminal(frame: tuple[Shown, int, int]) -> None:
    shown, columns, rows = frame
    assert shown.code == 0, shown.text
    lines = shown.rows
    assert len(lines) <= rows
    assert max(map(cell_len, lines)) <= columns
    full = "\n".join(lines)
    assert f"finished {STEPS} steps" in lines[0]
    assert all(title in full for title in TITLES)
    assert "staleness (bound 2)" in full
    assert "reward" in full and "tok" in full


@pytest.mark.parametrize("frame", SIZES[:1], indirect=True)
def test_nothing_is_coloured_where_no_colour_is_wanted(
    recorded: RecordedRun, frame: tuple[Shown, int, int]
) -> None:
    words = ["top", recorded.directory, "--once"]
    coloured, columns, rows = frame
    plain = in_terminal(words, columns=columns, rows=rows, env=environment(NO_COLOR="1"))
    assert COLOUR.search(coloured.text)
    assert not COLOUR.search(plain.text)
    assert plain.rows == coloured.rows


def test_pipe_gets_plain_lines_one_per_step(recorded: RecordedRun) -> None:
    done = _piped("top", recorded.directory)
    lines = done.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["step", str(n)] for n in range(STEPS)]
    assert lines[-1].startswith(f"recorded: finished {STEPS} steps")
    assert "\x1b" not in done


def _piped(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", OUT, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=True,
    )
    return done.stdout


def test_run_that_goes_on_has_a_screen_of_its_own_until_ctrl_c(open_run: RecordedRun) -> None:
    shown = in_terminal(
        ["top", open_run.directory, "--every", "0.1"],
        columns=80,
        rows=24,
        interrupt_at="waits",
    )
    assert shown.code == 130
    entered, remaining = shown.text.index("\x1b[?1049h"), shown.text.index("\x1b[?1049l")
    assert "no record since" in shown.text[entered:remaining]
    assert "Traceback" not in shown.text[remaining:]


def test_interval_that_would_burn_a_core_is_refused(recorded: RecordedRun, call: Call) -> None:
    code, _, err = call("top", recorded.directory, "--every", "0")
    assert code == 2
    assert "Invalid value for '--every'" in err
