"""The main thread of a task process: calls from the pipe, and functions that the loop hands to it.

Some libraries work there alone (those that use signals, such as math-verify), so a user's function
that is not `async` runs there on every attempt. What exceeds its limit is interrupted by a signal:
`GivenUp` is raised in it. What ignores that, or holds the interpreter, ends the process.
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
"""Interval of the watch over the limit."""

STUCK_S: Final = 2.0
"""Time that an interrupted function has to end."""

INTERRUPT: Final = signal.SIGURG
"""A signal that by default does nothing and that no common library uses."""


class GivenUp(BaseException):
    """Raised in a function whose result is not awaited any more."""


@dataclass(slots=True)
class Limit:
    """When a call in the main thread is late."""

    number: int = 0
    """The call from the pipe; 0: a function of the loop."""
    late_at_s: float = math.inf


@dataclass(slots=True)
class Work:
    """A function to be called, and the future of its result."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    limit_s: float = 0.0
    waits: Callable[[bool], None] | None = None
    """Called with False when a call that waited begins."""
    limit: Limit = field(default_factory=Limit)

    def do(self) -> None:
        """Call it, and hand its result, or what it raised, to the loop."""
        set_it: Callable[[Any], None] = self.done.set_exception
        outcome: Any
        try:
            outcome, set_it = self.run(*self.arguments), self.done.set_result
        except StopIteration as error:  # no future takes one
            outcome = RuntimeError(f"it raised StopIteration: {error}")
        except BaseException as error:  # raised where the result is awaited
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop is gone: the process ends
            self.loop.call_soon_threadsafe(self._tell, set_it, outcome)

    def _tell(self, set_it: Callable[[Any], None], outcome: Any) -> None:
        if not self.done.done():
            set_it(outcome)


class MainThread:
    """Functions of the main thread, with a limit for the present one. `serve` and what follows it
    are called in that thread, `call_from_loop` in the loop."""

    def __init__(self) -> None:
        self.serves = False
        """Whether functions of the loop are taken."""
        self._work: deque[Work] = deque()
        self._present: Limit | None = None
        self._inside = False
        self._thread = threading.main_thread()

    @property
    def is_here(self) -> bool:
        """Whether this code runs in it."""
        return threading.current_thread() is self._thread

    def serve(self, inbox: int) -> None:
        """Take functions of the loop until `stop`, while `wait` waits for the pipe."""
        signal.signal(INTERRUPT, self._interrupted)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._inbox = inbox
        self._poll = select.poll()
        self._poll.register(inbox, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        self.serves = True

    def stop(self) -> None:
        """Take no more functions of the loop."""
        self.serves = False

    def wait(self) -> None:
        """Call what the loop hands over, until the pipe has something, or its end."""
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._woken in ready:
                os.read(self._woken, 4096)
                self.run_work()
            if self._inbox in ready:
                return

    def run_work(self) -> None:
        """Call what the loop has handed over."""
        while self._work:
            work = self._work.popleft()
            if not work.done.cancelled():
                if work.waits is not None:
                    work.waits(False)
                with self.limited(work.limit, work.limit_s):
                    work.do()

    @contextlib.contextmanager
    def limited(self, limit: Limit, limit_s: float) -> Iterator[None]:
        """Limit the time of what is called inside; 0: no limit."""
        if limit_s:
            limit.late_at_s = min(limit.late_at_s, time.monotonic() + limit_s)
        self._present = limit
        try:
            yield
        finally:
            self._present = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a user's function. Raises GivenUp where it was interrupted."""
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
        """Return what a function gives that is called in the main thread; cancelled, it is
        interrupted. `waits`: see `Place`."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        called = (copy_context().run, function, *arguments)
        waits(True)
        work = Work(self.call, called, loop, done, limit_s, waits)
        self._work.append(work)
        with contextlib.suppress(BlockingIOError):  # full: it wakes up anyway
            os.write(self._wake, b".")
        try:
            return await done
        finally:
            if done.cancelled():
                work.limit.late_at_s = time.monotonic()

    def watch(self, stuck: Callable[[int], None]) -> None:
        """Interrupt what exceeds its limit, until a call does not end then: `stuck` gets its
        number. Blocks: called in a thread of its own."""
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
        """In the main thread: raise, where it is in a user's function that is late. Once: then it
        is on its way out."""
        limit = self._present
        if self._inside and limit is not None and time.monotonic() >= limit.late_at_s:
            self._inside = False
            raise GivenUp


MAIN: Final = MainThread()
