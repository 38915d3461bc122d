"""Main thread of a task process.

Users' functions that are not `async` run here, since some libraries need its signals (math-verify).
A late function is interrupted by a signal that raises `GivenUp`; if that fails, the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Final

WATCH_S: Final = 0.25

STUCK_S: Final = 2.0

INTERRUPT: Final = signal.SIGURG
"""Ignored by default and unused by common libraries."""


class GivenUp(BaseException):
    """Raised in a function whose result is not needed."""


@dataclass(slots=True)
class Limit:
    """Time limit of a call in the main thread."""

    number: int = 0
    late_at_s: float = math.inf


@dataclass(slots=True)
class Work:
    """Function to call, with its future."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    limit_s: float = 0.0
    waits: Callable[[bool], None] | None = None
    """Called with False when the function starts."""
    limit: Limit = field(default_factory=Limit)

    def do(self) -> None:
        set_it: Callable[[Any], None] = self.done.set_exception
        outcome: Any
        try:
            outcome, set_it = self.run(*self.arguments), self.done.set_result
        except StopIteration as error:  # futures reject StopIteration
            outcome = RuntimeError(f"it raised StopIteration: {error}")
        except BaseException as error:  # raised where the result is awaited
            outcome = error
        with contextlib.suppress(RuntimeError):  # no loop: the process is ending
            self.loop.call_soon_threadsafe(self._tell, set_it, outcome)

    def _tell(self, set_it: Callable[[Any], None], outcome: Any) -> None:
        if not self.done.done():
            set_it(outcome)


class MainThread:
    """Runs functions with a time limit. Only `call_from_loop` is called in the loop."""

    def __init__(self) -> None:
        self.serves = False
        self._work: deque[Work] = deque()
        self._present: Limit | None = None
        self._inside = False
        self._thread = threading.main_thread()

    @property
    def is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def serve(self, inbox: int) -> None:
        signal.signal(INTERRUPT, self._interrupted)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._inbox = inbox
        self._poll = select.poll()
        self._poll.register(inbox, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self.serves = True

    def stop(self) -> None:
        self.serves = False

    def wait(self) -> None:
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._woken in ready:
                os.read(self._woken, 4096)
                self.run_work()
            if self._inbox in ready:
                return

    def run_work(self) -> None:
        while self._work:
            work = self._work.popleft()
            if not work.done.cancelled():
                if work.waits is not None:
                    work.waits(False)
                with self.limited(work.limit, work.limit_s):
                    work.do()

    @contextlib.contextmanager
    def limited(self, limit: Limit, limit_s: float) -> Iterator[None]:
        """Limit the time of the block."""
        if limit_s:
            limit.late_at_s = min(limit.late_at_s, time.monotonic() + limit_s)
        self._present = limit
        try:
            yield
        finally:
            self._present = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Raises GivenUp if interrupted."""
        if not self.is_here:
            return function(*arguments)
        self._inside = True
        try:
            return function(*arguments)
        finally:
            self._inside = False

    async def call_from_loop(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        limit_s: float,
        waits: Callable[[bool], None],
    ) -> Any:
        """Call a function in the main thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        called = (copy_context().run, function, *arguments)
        waits(True)
        work = Work(self.call, called, loop, done, limit_s, waits)
        self._work.append(work)
        with contextlib.suppress(BlockingIOError):  # pipe full: it wakes up anyway
            os.write(self._wake, b".")
        try:
            return await done
        finally:
            if done.cancelled():
                work.limit.late_at_s = time.monotonic()

    def watch(self, stuck: Callable[[int], None]) -> None:
        """Interrupt late functions until one does not end; `stuck` gets its number. Blocks."""
        while True:
            time.sleep(WATCH_S)
            limit = self._present
            if limit is None or time.monotonic() < limit.late_at_s:
                continue
            if time.monotonic() > limit.late_at_s + STUCK_S:
                stuck(limit.number)
                return
            assert self._thread.ident is not None
            signal.pthread_kill(self._thread.ident, INTERRUPT)

    def _interrupted(self, *_: object) -> None:
        """Raise GivenUp once in a late function."""
        limit = self._present
        if self._inside and limit is not None and time.monotonic() >= limit.late_at_s:
            self._inside = False
            raise GivenUp


MAIN: Final = MainThread()
