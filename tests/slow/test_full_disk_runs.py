"""Whole runs, as a user starts them, on a disk that fills up below log and policies."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.core.loop.retry import DELIVERY_TIMEOUT_S
from tests.support.small_disk import SmallDisk, small_disk
from tests.support.user_run import assert_clean, call, furnish, start, steps, until

pytestmark = [pytest.mark.slow, pytest.mark.pure]  # they wait, and measure no time

SIZE_MIB = 320
"""A run asks for 200 MiB before it starts."""
STEPS = 12
RUN = "tiny"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", SIZE_MIB) as disk:
        yield disk


@pytest.fixture
def directory(tmp_path: Path, disk: SmallDisk) -> Path:
    directory = furnish(tmp_path / "user")
    (disk.path / "runs").mkdir()
    (directory / "runs").symlink_to(disk.path / "runs")
    return directory


def _log_text(path: Path) -> str:
    return (path / "said").read_text() if (path / "said").exists() else ""


@pytest.fixture
def running(directory: Path, disk: SmallDisk) -> Iterator[subprocess.Popen[bytes]]:
    running = start(directory, "run", "config.toml", "-o", f"run.steps={STEPS}")
    until(lambda: running.poll() is not None or "step" in _log_text(directory))
    assert running.poll() is None, _log_text(directory)
    until(
        lambda: (
            (directory / "runs" / RUN / "log.sqlite").exists() and len(steps(directory, RUN)) >= 2
        )
    )
    disk.fill()
    until(lambda: "is full" in _log_text(directory))
    yield running
    running.kill()
    running.wait()


def test_run_goes_on_by_itself_when_room_is_made_and_holds(
    directory: Path, disk: SmallDisk, running: subprocess.Popen[bytes]
) -> None:
    assert "roles wait, dispatch is paused: free space within 120 s" in _log_text(directory)
    (directory / "why").write_bytes(_output(directory, "why", RUN))
    assert "is full" in (directory / "why").read_text()
    assert "is full" in _output(directory, "top", RUN, "--once").decode()
    done = len(steps(directory, RUN))
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(20)
    assert len(steps(directory, RUN)) <= done + 1 < STEPS, "what was under way, and nothing more"
    disk.make_room()
    until(lambda: "disk space is available again; the run continues" in _log_text(directory))
    assert running.wait(DELIVERY_TIMEOUT_S) == 0, _log_text(directory)
    assert steps(directory, RUN) == list(range(STEPS))
    assert_clean(directory, RUN)


def test_run_without_room_ends_with_one_line_and_goes_on_as_that_says(
    directory: Path, disk: SmallDisk, running: subprocess.Popen[bytes]
) -> None:
    assert running.wait(DELIVERY_TIMEOUT_S + 60) == 7, _log_text(directory)
    lines = _log_text(directory).splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and "is full" in errors[0] and "for 120 s" in errors[0], lines
    assert lines[-1].startswith("hint: free space"), lines
    (goes_on,) = [line for line in lines if "resume it with: " in line]
    done = steps(directory, RUN)
    assert done == list(range(len(done))) and len(done) < STEPS
    disk.make_room()
    words = shlex.split(goes_on.partition("resume it with: ")[2])
    assert words[0] == "dora-pipe"
    assert call(directory, *words[1:]) == 0, _log_text(directory)
    assert steps(directory, RUN) == list(range(STEPS))
    assert_clean(directory, RUN)


def _output(path: Path, *words: str) -> bytes:
    position = len(_log_text(path))
    assert call(path, *words) == 0, _log_text(path)
    return _log_text(path)[position:].encode()
