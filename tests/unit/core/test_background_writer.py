"""Tests of background appends of records that may be lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from dora_pipe.core.errors import BusFull
from dora_pipe.core.loop.effect_runner import BackgroundWriter
from dora_pipe.core.pure.records import Append

WAIT_S = 30.0


class SlowWriter:
    def __init__(self) -> None:
        self.go, self.closed = threading.Event(), False
        self.appended: list[bytes] = []
        self.done = threading.Semaphore(0)
        self.error: Exception | None = None

    def append(self, records: Sequence[Append]) -> list[int]:
        assert self.go.wait(WAIT_S)
        try:
            if self.error is not None:
                raise self.error
            self.appended += [record.value for record in records]
        finally:
            self.done.release()
        return list(range(len(records)))

    def close(self) -> None:
        self.closed = True


def one(text: str) -> list[Append]:
    return [Append(topic="t", value=text.encode())]


def test_nobody_waits_and_what_comes_meanwhile_is_left_out() -> None:
    slow = SlowWriter()
    background = BackgroundWriter(slow)
    for text in ("first", "second", "third"):
        assert background.append(one(text)) == []
    slow.go.set()
    background.close()
    assert slow.appended == [b"first"]
    assert slow.closed


def test_what_went_wrong_is_raised_at_the_next_append_which_goes_on() -> None:
    slow = SlowWriter()
    background = BackgroundWriter(slow)
    slow.error = BusFull("no room")
    slow.go.set()
    background.append(one("lost"))
    assert slow.done.acquire(timeout=WAIT_S)
    slow.error = None
    with pytest.raises(BusFull, match="no room"):
        while not slow.appended:
            background.append(one("kept"))
    background.close()
    assert set(slow.appended) == {b"kept"}


def test_an_error_of_ours_ends_the_role_and_not_only_the_thread() -> None:
    slow = SlowWriter()
    background = BackgroundWriter(slow)
    slow.error = RuntimeError("a mistake")
    slow.go.set()
    background.append(one("lost"))
    with pytest.raises(RuntimeError, match="a mistake"):
        while True:
            background.append(one("more"))
    background.close()
