"""Tests of full disks: reported, bounded in time, no penalty."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import MESSAGE_CHARACTERS_MAX, ResourceError
from dora_pipe.core.loop.retry import DELIVERY_TIMEOUT_S
from dora_pipe.core.system.console import LOG_CHARACTERS_MAX, LogLines
from dora_pipe.core.system.own_code import TRACEBACK_LINES_MAX, traceback_of
from dora_pipe.launch import disk_watch as disk
from dora_pipe.launch.disk_watch import FULL_BYTES, DiskWatch
from tests.support.worker import VirtualClock


class Disk:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 10 * FULL_BYTES
        monkeypatch.setattr(disk, "free_bytes", lambda path: self.free)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def look(watch: DiskWatch, clock: VirtualClock, seconds: float) -> None:
    for _ in range(int(seconds * 2)):
        clock.ns += 500_000_000
        watch.turn()


def test_a_full_disk_is_told_once_and_so_is_room(room: Disk, tmp_path: Path) -> None:
    replies: list[str] = []
    clock = VirtualClock()
    watch = DiskWatch((tmp_path,), replies.append, clock)
    look(watch, clock, 5)
    assert (replies, watch.full) == ([], False)
    room.free = 0
    look(watch, clock, 30)
    assert watch.full
    (line,) = replies
    assert line.startswith(f"the disk under {tmp_path} is full: 0 B free; roles wait, dispatch is")
    assert f"{DELIVERY_TIMEOUT_S:g} s" in line
    room.free = 10 * FULL_BYTES
    look(watch, clock, 5)
    assert replies[1:] == ["disk space is available again; the run continues"]
    assert not watch.full


def test_a_disk_that_stays_full_ends_the_run_with_one_line(room: Disk, tmp_path: Path) -> None:
    clock = VirtualClock()
    watch = DiskWatch((tmp_path,), lambda line: None, clock)
    room.free = 100
    with pytest.raises(ResourceError, match="is full: 100 B free for 120 s") as ended:
        look(watch, clock, DELIVERY_TIMEOUT_S + 10)
    assert "free space" in (ended.value.hint or "")
    assert clock.ns < (DELIVERY_TIMEOUT_S + 5) * 1e9


def test_a_text_of_any_length_is_cut_before_it_reaches_a_log() -> None:
    lines = LogLines("%(message)s")
    try:
        raise ValueError("y" * 300_000)
    except ValueError as error:
        raised: Any = (ValueError, error, error.__traceback__)
    record = logging.LogRecord("n", logging.INFO, "p", 1, "%s", ("x" * 300_000,), raised)
    written = lines.format(record)
    assert max(map(len, written.splitlines())) <= LOG_CHARACTERS_MAX


@pytest.mark.parametrize("text", ["x" * 300_000, "line\n" * 60_000])
def test_what_a_reward_raised_is_cut_before_it_reaches_a_role_s_log(text: str) -> None:
    try:
        raise KeyError(text) if "\n" not in text else ValueError(text)
    except (KeyError, ValueError) as error:
        shown = traceback_of(error)
    lines = shown.splitlines()
    assert lines[0].startswith("Traceback")
    assert max(map(len, lines)) <= MESSAGE_CHARACTERS_MAX
    assert len(lines) <= TRACEBACK_LINES_MAX + 1
