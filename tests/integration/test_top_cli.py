"""`top` in terminals of two sizes, without colour, in a pipe, and on a run that goes on."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rich.cells import cell_len

from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.terminal import COLOUR, OUT, environment, in_terminal

SIZES = [(80, 24), (200, 60)]
TITLES = ("workers", "run", "who waits for whom", "last decisions")


@pytest.fixture
def open_run(recorded: RecordedRun, tmp_path: Path) -> RecordedRun:
    """The same run before it was stopped: its last round is not there yet."""
    found = recorded.copy(tmp_path / "recorded")
    with closing(sqlite3.connect(found.log)) as log, log:
        last = log.execute(
            "SELECT max(at) FROM log WHERE topic = ?", (found.topics.decisions,)
        ).fetchone()
        log.execute("DELETE FROM records WHERE at = ?", last)
    return found


@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_frame_fits_the_terminal(recorded: RecordedRun, columns: int, rows: int) -> None:
    shown = in_terminal(["top", recorded.directory, "--once"], columns=columns, rows=rows)
    assert shown.code == 0, shown.text
    lines = shown.rows
    assert len(lines) <= rows
    assert max(map(cell_len, lines)) <= columns
    whole = "\n".join(lines)
    assert f"over after {STEPS} steps" in lines[0]
    assert all(title in whole for title in TITLES)
    assert "staleness (bound 2)" in whole
    assert "reward" in whole and "tok" in whole


def test_large_terminal_shows_what_a_small_one_leaves_out(recorded: RecordedRun) -> None:
    small, large = (
        "\n".join(in_terminal(["top", recorded.directory, "--once"], columns=c, rows=r).rows)
        for c, r in SIZES
    )
    assert "groups:" not in small
    assert "groups:" in large
    assert "stop the run: " in small


def test_nothing_is_coloured_where_no_colour_is_wanted(recorded: RecordedRun) -> None:
    words = ["top", recorded.directory, "--once"]
    coloured = in_terminal(words, columns=80, rows=24)
    plain = in_terminal(words, columns=80, rows=24, env=environment(NO_COLOR="1"))
    assert COLOUR.search(coloured.text)
    assert not COLOUR.search(plain.text)
    assert plain.rows == coloured.rows


def test_pipe_gets_plain_lines_one_per_step(recorded: RecordedRun) -> None:
    done = _piped("top", recorded.directory)
    lines = done.splitlines()
    assert [line.split("  ")[0] for line in lines[:-1]] == [f"step {n}" for n in range(STEPS)]
    assert lines[-1].startswith(f"recorded: over after {STEPS} steps")
    assert "\x1b" not in done


def test_pipe_gets_one_frame_as_plain_lines_where_one_is_asked_for(recorded: RecordedRun) -> None:
    done = _piped("top", recorded.directory, "--once")
    assert all(title in done.splitlines() for title in TITLES)
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
        interrupt_at="who waits for whom",
    )
    assert shown.code == 130
    entered, left = shown.text.index("\x1b[?1049h"), shown.text.index("\x1b[?1049l")
    assert "nothing was heard since" in shown.text[entered:left]
    assert "Traceback" not in shown.text[left:]


def test_interval_that_would_burn_a_core_is_refused(recorded: RecordedRun) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OUT, "top", str(recorded.directory), "--every", "0"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "--every 0 is too short" in done.stderr
