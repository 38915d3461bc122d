"""What the machine itself can do with the bytes of our records: its disk, and a copy in memory.

No plane is faster than these, so they say which share of that each of them reaches. Nothing is
encoded (the first record's value stands for all), digested, decoded or looked at. Decides nothing.
"""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import numpy as np

from dora_pipe.bench.dataplane.carriers import Inbox, Outbox
from dora_pipe.bench.dataplane.process import GROUP_SIZE
from dora_pipe.bench.dataplane.source import encoded
from dora_pipe.bus.claim_check import AT_ONCE
from dora_pipe.core.direct_io import read_direct, write_direct
from dora_pipe.core.heap import keep_freed
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.trajectory import Trajectory

MEMORY: Final = Path("/dev/shm")
"""A file system in memory; what is mapped there is one memory for both processes."""

SLOTS: Final = 8
SLOT_BYTES: Final = 64 * 1024 * 1024
"""Of which only what is written takes memory."""

LOOK_S: Final = 0.0002
"""Between two looks whether the other side has gone on."""

_COUNTS_BYTES: Final = 4096


class BoundOutbox(Outbox):
    """The same value again and again, with the numbers 0, 1, ..."""

    def __init__(self) -> None:
        self._value = b""
        self._next = 0

    def encode(self, trajectory: Trajectory) -> tuple[Any, int]:
        self._value = self._value or encoded(trajectory, "t").value
        self._next += 1
        return (self._next - 1, self._value), len(self._value)

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class BoundInbox(Inbox):
    """Values by their numbers, in memory that is kept, as the log's reader has it."""

    def __init__(self) -> None:
        keep_freed()
        self._next = 0

    def open(self, one: Any) -> tuple[str, int]:
        number, value = one
        ordinal, sibling = divmod(number, GROUP_SIZE)
        return trajectory_id(group_id("train", ordinal), sibling), len(value)


class DiskOutbox(BoundOutbox):
    """A file for each, past the page cache, two at a time as the log does it."""

    def __init__(self, folder: str, run: str) -> None:
        super().__init__()
        self._folder = Path(folder) / run
        self._folder.mkdir(exist_ok=True)
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def put(self, held: Sequence[Any]) -> None:
        list(self._pool.map(self._write, held))

    def _write(self, one: tuple[int, bytes]) -> None:
        unnamed = self._folder / f".{one[0]}"
        write_direct(unnamed, one[1], synced=False)
        unnamed.replace(self._folder / str(one[0]))

    def close(self) -> None:
        self._pool.shutdown()


class DiskInbox(BoundInbox):
    """Reads every file once, and removes them when it is closed."""

    def __init__(self, folder: str, run: str) -> None:
        super().__init__()
        self._folder = Path(folder) / run
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def take(self, *, timeout_s: float, at_most: int) -> list[Any]:
        _await(lambda: self._size(self._next) > 0, time.monotonic() + timeout_s)
        there = list(takewhile(self._size, range(self._next, self._next + at_most)))
        self._next += len(there)
        return list(self._pool.map(self._read, there))

    def _size(self, number: int) -> int:
        try:
            return (self._folder / str(number)).stat().st_size
        except FileNotFoundError:
            return 0

    def _read(self, number: int) -> tuple[int, bytes]:
        value = read_direct(self._folder / str(number), self._size(number))
        assert value is not None
        return number, value

    def close(self) -> None:
        self._pool.shutdown()
        shutil.rmtree(self._folder)


class _Shared:
    """Slots in a memory that both processes have; each writes one of two counts: how many values
    were put, and how many were taken."""

    def __init__(self, run: str) -> None:
        self.path = MEMORY / run
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(handle, _COUNTS_BYTES + SLOTS * SLOT_BYTES)
        self._memory = mmap.mmap(handle, 0)
        os.close(handle)
        counts = np.frombuffer(self._memory, np.uint64, 2 + SLOTS)
        self.put, self.taken, self.sizes = counts[:1], counts[1:2], counts[2:]

    def has_room(self, number: int) -> bool:
        """For this value: the one that had its slot was taken."""
        return number - int(self.taken[0]) < SLOTS

    def slot(self, number: int) -> memoryview:
        """Of a value, as large as it may be."""
        at = _COUNTS_BYTES + number % SLOTS * SLOT_BYTES
        return memoryview(self._memory)[at : at + SLOT_BYTES]


class CopyOutbox(BoundOutbox):
    """Copies each into a memory that is used again and again."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._shared = _Shared(run)

    def put(self, held: Sequence[Any]) -> None:
        shared = self._shared
        for number, value in held:
            _await(partial(shared.has_room, number), None)
            shared.slot(number)[: len(value)] = value
            shared.sizes[number % SLOTS] = len(value)
            shared.put[0] = number + 1


class CopyInbox(BoundInbox):
    """Copies each out of it."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._shared = _Shared(run)

    def take(self, *, timeout_s: float, at_most: int) -> list[Any]:
        shared, first = self._shared, self._next
        _await(lambda: int(shared.put[0]) > first, time.monotonic() + timeout_s)
        found = []
        for number in range(first, min(int(shared.put[0]), first + at_most)):
            size = int(shared.sizes[number % SLOTS])
            found.append((number, bytes(shared.slot(number)[:size])))
            shared.taken[0] = self._next = number + 1
        return found

    def close(self) -> None:
        self._shared.path.unlink()


def _await(true: Callable[[], bool], until_s: float | None) -> None:
    """Return when it is, or when it is that late."""
    while not true() and (until_s is None or time.monotonic() < until_s):
        time.sleep(LOOK_S)
