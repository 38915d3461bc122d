"""Event loop and threads of a task process.

A call starts in the main thread and continues in the loop when a user's function returns an
awaitable or needs a thread.

A cancelled call raises an exception in its thread, which ends most Python code; a thread that
continues is hung. Above `HUNG_MAX` hung threads the process asks for a replacement, above
`HUNG_MOST` it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from dora_pipe.producers.tasks.main_thread import MAIN, GivenUp, Work

T = TypeVar("T")

HUNG_MAX: Final = 8

HUNG_MOST: Final = 256

THREADS_ELSEWHERE: Final = 256


class Threads:
    """Thread pool for blocking functions, used in the loop."""

    def __init__(self, most: int) -> None:
        self._room = asyncio.Semaphore(most)
        self._home: asyncio.AbstractEventLoop | None = None
        self._idle: list[_Thread] = []
        self._given_up: set[threading.Thread] = set()

    @property
    def hung(self) -> int:
        return sum(thread.is_alive() for thread in list(self._given_up))

    async def call(
        self, function: Callable[..., Any], *arguments: Any, waits: Callable[[bool], None]
    ) -> Any:
        """Call a function in a thread.

        `waits` is called with True if no thread is free, then with False.
        """
        loop = asyncio.get_running_loop()
        self._home = self._home or loop
        if loop is not self._home:  # a loop of users' code, in a thread that already counts
            return await self._call(function, arguments)
        if not self._room.locked():
            async with self._room:
                return await self._call(function, arguments)
        waits(True)
        async with self._room:
            waits(False)
            return await self._call(function, arguments)

    async def _call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()
        thread = self._idle.pop() if self._idle else _Thread()
        work = Work(copy_context().run, (function, *arguments), loop, done)
        thread.queue.put(work)
        try:
            return await done
        finally:
            if done.cancelled():
                self._give_up(thread)
            else:
                self._idle.append(thread)

    def _give_up(self, thread: _Thread) -> None:
        self._given_up = {one for one in self._given_up if one.is_alive()}
        thread.give_up()
        self._given_up.add(thread.thread)


class _Thread:
    def __init__(self) -> None:
        self.queue: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._busy = False
        self.thread = threading.Thread(target=self._forever, daemon=True)
        self.thread.start()

    def give_up(self) -> None:
        """End the thread, immediately in Python code."""
        self.queue.put(None)
        with self._lock:
            if self._busy and self.thread.ident is not None:
                ident = ctypes.c_ulong(self.thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(GivenUp))

    def _forever(self) -> None:
        with contextlib.suppress(GivenUp):
            while (work := self.queue.get()) is not None:
                with self._lock:
                    self._busy = True
                work.do()
                with self._lock:
                    self._busy = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Place to run functions that are not `async`."""

    threads: Threads
    beside: bool = False
    """Run in threads."""
    waits: Callable[[bool], None] = field(default=lambda _: None)
    """Called with True and False around a wait for a thread."""
    limit_s: float = 0.0


ELSEWHERE: Final = Place(threads=Threads(THREADS_ELSEWHERE))

PLACE: Final[ContextVar[Place]] = ContextVar("place")


def in_loop() -> bool:
    """Return whether this code runs in a loop."""
    return asyncio._get_running_loop() is not None  # 10x faster than get_running_loop


@dataclass(frozen=True, slots=True)
class ContinueInLoop:
    """Awaitable that moves a coroutine from the main thread to the loop."""

    pause_s: float = 0.0

    def __await__(self) -> Generator[ContinueInLoop, None, None]:
        yield self


def begin(work: Coroutine[Any, Any, None]) -> ContinueInLoop | None:
    """Run a coroutine until it ends or must continue in the loop."""
    try:
        switch = work.send(None)
    except StopIteration:
        return None
    assert isinstance(switch, ContinueInLoop), "only the event loop may await"
    return switch


async def call_user_code(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the awaited result of a user's function, called in the main thread or where `PLACE`
    says."""
    place = PLACE.get(ELSEWHERE)
    if inspect.iscoroutinefunction(function):
        found = function(*arguments)
    elif place.beside:
        found = await _call_in_thread(place, function, arguments)
    elif not in_loop() or MAIN.is_here:
        found = MAIN.call(function, *arguments)
    elif MAIN.serves:
        found = await MAIN.call_from_loop(
            function, *arguments, limit_s=place.limit_s, waits=place.waits
        )
    else:
        found = await _call_in_thread(place, function, arguments)
    return await _awaited(found)


async def call_beside(function: Callable[..., Any], *arguments: Any) -> Any:
    """Same as `call_user_code`, in a thread."""
    if inspect.iscoroutinefunction(function):
        return await _awaited(function(*arguments))
    return await _awaited(await _call_in_thread(PLACE.get(ELSEWHERE), function, arguments))


async def _call_in_thread(
    place: Place, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    if not in_loop():
        await ContinueInLoop()
    return await place.threads.call(function, *arguments, waits=place.waits)


async def _awaited(found: Any) -> Any:
    if not inspect.isawaitable(found):
        return found
    if not in_loop():
        await ContinueInLoop()
    return await found
