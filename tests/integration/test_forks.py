"""Helpers that are forked when they are asked for: what they get, give, and how they end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from dora_pipe.core.errors import ResourceError
from dora_pipe.launch.fork_server import ForkedHelpers

WAIT_S = 20.0


def work(words: bytes, out: IO[bytes]) -> None:
    """Say who this is, then do what the words say."""
    out.write(f"{os.getpid()} ".encode())
    if words == b"raise":
        raise ValueError("told to")
    if words == b"write":
        while True:
            out.write(b"x" * 4096)
    out.write(words)
    out.flush()
    if words == b"sleep":
        time.sleep(3600)


@pytest.fixture
def forks() -> Iterator[ForkedHelpers]:
    """Made before the test opens anything."""
    with ForkedHelpers(work) as found:
        yield found


def whole(fd: int) -> bytes:
    """All that a helper wrote."""
    with os.fdopen(fd, "rb") as out:
        return out.read()


def gone(pid: int) -> bool:
    """Whether a process ends soon."""
    limit_s = time.monotonic() + WAIT_S
    while time.monotonic() < limit_s:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.01)
    return False


def test_each_helper_gets_its_words_in_a_process_of_its_own(forks: ForkedHelpers) -> None:
    fds = [forks.start(words) for words in (b"one", b"two", b"x" * 100_000)]
    answers = [whole(fd).split() for fd in fds]
    assert [words for _, words in answers] == [b"one", b"two", b"x" * 100_000]
    assert len({pid for pid, _ in answers} | {b"%d" % os.getpid()}) == 4


def test_helper_that_raises_ends_its_pipe_and_others_start_after_it(forks: ForkedHelpers) -> None:
    whole(forks.start(b"raise"))
    assert whole(forks.start(b"next")).endswith(b" next")


def test_helper_ends_when_nobody_reads_it_any_longer(forks: ForkedHelpers) -> None:
    fd = forks.start(b"write")
    pid = int(os.read(fd, 4096).split()[0])
    os.close(fd)
    whole(forks.start(b"reap"))
    limit_s = time.monotonic() + WAIT_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < limit_s:
        whole(forks.start(b"reap"))
    assert not Path(f"/proc/{pid}").exists()


def test_helper_that_works_ends_with_who_asked(forks: ForkedHelpers) -> None:
    fd = forks.start(b"sleep")
    pid = int(os.read(fd, 4096).split()[0])
    forks.close()
    assert gone(pid)
    os.close(fd)


def test_interrupt_is_not_for_helpers(forks: ForkedHelpers) -> None:
    fd = forks.start(b"sleep")
    pid = int(os.read(fd, 4096).split()[0])
    os.kill(pid, signal.SIGINT)
    assert whole(forks.start(b"meanwhile")).endswith(b" meanwhile")
    assert Path(f"/proc/{pid}").exists()
    os.close(fd)


def test_after_the_end_nobody_starts(forks: ForkedHelpers) -> None:
    forks.close()
    forks.close()
    with pytest.raises(ResourceError, match="no helper can be started"):
        forks.start(b"late")
