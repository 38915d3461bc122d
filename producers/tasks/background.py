"""Threads of a task process: an asyncio loop in a thread of its own, and threads for functions that
would block it.

A call is a coroutine. It starts in the main thread and stays there as long as users' functions
give their results at once; where one gives an awaitable, or is to run in a thread, the call goes
on in the loop, from exactly there (`call_user_code`). A function that belongs into the main thread
is called there also from the loop (`main_thread`).

Of `Threads` there are so many at a time; what finds none waits for one. A thread whose result
nobody waits for any more is given up: an exception is raised in it, which ends code that is written
in Python. Code that is not, or that catches everything, stays: that thread is *hung*. It takes
no room of others; so many of them (`HUNG_MAX`) are borne before the process asks to be replaced,
and `HUNG_MOST` before it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from dora_pipe.producers.tasks.main_thread import MAIN, GivenUp, Work

T = TypeVar("T")

HUNG_MAX: Final = 8
"""Threads that a process holds for nobody before it gets no new episodes."""

HUNG_MOST: Final = 256
"""Such threads with which it ends, whatever episodes it has."""

THREADS_ELSEWHERE: Final = 256
"""Of code that runs outside of calls."""


class Threads:
    """Threads for what would block the loop. Used in the loop alone, but for `hung`.

    Example: ``found = await Threads(64).call(world.step, "north")``.
    """

    def __init__(self, most: int) -> None:
        """`most`: of those that somebody waits for."""
        self._room = asyncio.Semaphore(most)
        self._home: asyncio.AbstractEventLoop | None = None
        self._idle: list[_Thread] = []
        self._given_up: set[threading.Thread] = set()

    @property
    def hung(self) -> int:
        """Threads that still run although nobody waits for them."""
        return sum(thread.is_alive() for thread in list(self._given_up))

    async def call(
        self, function: Callable[..., Any], *arguments: Any, waits: Callable[[bool], None]
    ) -> Any:
        """What a function gives that is called in a thread; cancelled, the thread is given up.

        `waits` is told True where no thread is free, and False when there is one.
        """
        loop = asyncio.get_running_loop()
        self._home = self._home or loop
        if loop is not self._home:  # One that users' code runs, in a thread that counts already.
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
    """A thread that calls one function after the other, until it is given up."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Work | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._busy = False
        self.thread = threading.Thread(target=self._forever, daemon=True)
        self.thread.start()

    def give_up(self) -> None:
        """End it: at once where it runs Python's code, else when that gives its result."""
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
    """Where functions of a call run that are not `async`."""

    threads: Threads
    beside: bool = False
    """In threads; else in the main thread."""
    waits: Callable[[bool], None] = field(default=lambda _: None)
    """Called with True where the call waits for a thread, with False when it has one."""
    limit_s: float = 0.0
    """Limit of a function in the main thread; 0: none."""


ELSEWHERE: Final = Place(threads=Threads(THREADS_ELSEWHERE))

PLACE: Final[ContextVar[Place]] = ContextVar("place")


class Background:
    """A loop in a thread of its own; any thread may run something in it.

    Example::

        background = Background()
        background.run(server.answered(call))
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._starting = threading.Lock()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Go on with a coroutine in the loop; `cancel` of what this gives cancels it."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                args = (self._loop,)
                threading.Thread(target=self._forever, args=args, daemon=True).start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the loop, with whatever still runs in it."""
        self._stopped = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _forever(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while not self._stopped:
            # A task of users' that exits ends the loop's turn, not the other calls.
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
        loop.close()


def in_loop() -> bool:
    """Whether this code runs in a loop already."""
    return asyncio._get_running_loop() is not None  # the one that raises nothing: it costs a tenth


@dataclass(frozen=True, slots=True)
class ContinueInLoop:
    """Awaited in the main thread, it stops a coroutine, which then goes on in the loop."""

    pause_s: float = 0.0
    """What it will do there first is wait for so long."""

    def __await__(self) -> Generator[ContinueInLoop, None, None]:
        yield self


def begin(work: Coroutine[Any, Any, None]) -> ContinueInLoop | None:
    """Drive a coroutine in this thread, to its end or to where it has to go on in the loop."""
    try:
        switch = work.send(None)
    except StopIteration:
        return None
    assert isinstance(switch, ContinueInLoop), "outside the loop nothing else is awaited"
    return switch


async def call_user_code(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a user's function gives, or what that awaits to.

    A function that is not `async` is called in the main thread, or in a thread where `PLACE` says
    so. An awaitable is awaited in the loop, after a `ContinueInLoop`.
    """
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
    """As `call_user_code`, of what may run beside others of its kind: in a thread."""
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
