"""Tests of progress on stderr of long commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dora_pipe.bus.base import FAR, WatchedBus
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.cli import progress
from dora_pipe.cli.output import emit_line
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.core.pure.records import Append, TopicPartition

LIMIT_S = 30.0


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < end_s
        threading.Event().wait(0.005)


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("reading") as received_progress:
        received_progress("reading", 1, 2)
        emit_line("data")
    assert capsys.readouterr() == ("data\n", "")


def test_long_work_is_lines_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_S", 0.01)
    monkeypatch.setattr(progress, "LINE_S", 0.01)
    texts: list[str] = []
    monkeypatch.setattr(progress, "say", texts.append)
    with progress.progress("reading") as received_progress:
        received_progress("reading", 30, 100)
        until(lambda: len(texts) > 1)
    assert texts[-1] == "reading, 30% (0 s)"
    assert capsys.readouterr().out == ""


def test_readers_of_a_watched_log_tell_how_far_they_are() -> None:
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name="x.control")])
    bus.writer().append([Append(topic="x.control", value=b"v")] * (2 * FAR))
    replies: list[tuple[str, float, float | None]] = []

    class Heard(CommandProgress):
        def __call__(self, phase: str, done: float = 0, total: float | None = None) -> None:
            replies.append((phase, done, total))

    partition = TopicPartition("x.control", 0)
    reader = WatchedBus(bus, Heard()).reader({partition: 0})
    while reader.position(partition) < bus.end(partition):
        reader.poll(timeout_s=0)
    assert replies[0][0] == "reading control"
    assert replies[-1][1] == replies[-1][2] == bus.end(partition)
    assert [done for _, done, _ in replies] == sorted(done for _, done, _ in replies)
