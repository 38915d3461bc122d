"""Tests of commands on a truncated log: each ends with one line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.cli import main as cli
from dora_pipe.core.errors import LogDamaged
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.launch.roles import run_role
from dora_pipe.launch.run_dir import RunDir
from dora_pipe.launch.supervisor import FATAL_CODES
from tests.support.recorded_run import RecordedRun

LIMIT_S = 60
"""A command that takes longer than this tries again where nothing can help."""

COMMANDS: dict[str, tuple[str, ...]] = {
    "topics": ("log", "topics", "."),
    "log read": ("log", "read", "."),
    "show": ("show", ".", "3"),
    "why": ("why", "."),
    "why --summary": ("why", ".", "--summary"),
    "top --once": ("top", ".", "--once"),
    "top": ("top", "."),
    "audit": ("audit", "."),
    "replay": ("replay", "."),
    "replay RUN TRAJECTORY": ("replay", ".", "g0000000003-001"),
    "export parquet": ("export", "parquet", ".", "rows"),
    "prune": ("prune", "."),
    "mismatch": ("mismatch", "."),
    "control pause": ("control", "pause", "."),
    "run --resume": ("run", ".", "--resume", "--runs", ".."),
    "trainer": ("trainer", ".", "--runs", ".."),
    "worker": ("worker", ".", "--name", "w9", "--runs", ".."),
    "orchestrator": ("orchestrator", ".", "--runs", ".."),
}
"""Everything that opens a run's log, called in the run's directory."""


@pytest.fixture
def cut(recorded: RecordedRun, tmp_path: Path) -> RecordedRun:
    copy = recorded.copy(tmp_path / "recorded")
    os.truncate(copy.log, copy.log.stat().st_size // 2)
    return copy


@contextmanager
def limited() -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise AssertionError(f"still busy after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_on_a_cut_file_ends_with_one_line(
    name: str, cut: RecordedRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(cut.directory)
    monkeypatch.setattr(sys, "argv", ["dora-pipe", *COMMANDS[name]])
    with pytest.raises(SystemExit) as ended, limited():
        cli.main()
    lines = capfd.readouterr().err.splitlines()
    assert ended.value.code == LogDamaged.exit_code
    assert len(lines) == 2, lines
    assert "log.sqlite is damaged" in lines[0]
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize("size_bytes", [50, 100, 4096, 3 * 4096])
def test_a_file_cut_anywhere_is_damaged_and_never_asked_again(
    size_bytes: int, recorded: RecordedRun, tmp_path: Path
) -> None:
    log = recorded.copy(tmp_path / "recorded").log
    os.truncate(log, size_bytes)
    with closing(SqliteBus(log)) as bus, pytest.raises(LogDamaged), limited():
        retry_bus("looking", bus.topics, SystemClock())


def test_pages_lost_in_the_middle_end_who_reads_there(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    copy = recorded.copy(tmp_path / "recorded")
    size = copy.log.stat().st_size
    with copy.log.open("r+b") as file:
        file.seek(size // 3)
        file.write(bytes(size // 3))
    partition = TopicPartition(copy.topics.trajectories, 0)
    bus = copy.open()
    with (
        closing(bus),
        closing(bus.reader({partition: 0})) as reader,
        pytest.raises(LogDamaged),
        limited(),
    ):
        while retry_bus("reading", lambda: reader.poll(timeout_s=0.0), SystemClock()):
            pass


def test_a_role_on_a_damaged_log_is_not_started_again(tmp_path: Path) -> None:
    def start() -> None:
        raise LogDamaged("log.sqlite is damaged")

    pid = os.fork()
    if pid == 0:
        os._exit(run_role("w0", RunDir(tmp_path), start))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in FATAL_CODES
    assert "error: log.sqlite is damaged" in (tmp_path / "logs" / "w0.log").read_text()
