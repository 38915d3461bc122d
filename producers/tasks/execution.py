"""Threads of a task process that run users' functions.

The event loop answers calls. A function that is not `async` runs in the main thread, since some
libraries need its signals (math-verify), or in a thread of its own.

A cancelled call raises `GivenUp` in its function: in the main thread by a signal, which also
interrupts system calls, elsewhere only in Python code. A thread that continues is hung.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import signal
import threading
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from dora_pipe.producers.tasks.calls import CallState

INTERRUPT: Final = signal.SIGURG
"""Ignored by default and unused by common libraries."""

THREADS_ELSEWHERE: Final = 256


class GivenUp(BaseException):
    """Raised in a function whose result is not needed."""


@dataclass(slots=True, eq=False)
class Work:
    """Function to call, with its future."""

    run: Callable[[], Any]
    begins: Callable[[], None]
    done: asyncio.Future[Any]
    given_up: bool = False

    def do(self) -> None:
        settle: Callable[[Any], None] = self.done.set_exception
        outcome: Any
        try:
            self.begins()
            outcome, settle = self.run(), self.done.set_result
        except StopIteration as error:  # futures reject StopIteration
            outcome = RuntimeError(f"it raised StopIteration: {error}")
        except BaseException as error:  # raised where the result is awaited
            outcome = error
        self.settle(settle, outcome)

    def settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # no loop: the process is ending
            self.done.get_loop().call_soon_threadsafe(self._settle, settle, outcome)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        if self.given_up:
            self.done.set_result(None)
        elif not self.done.done():
            settle(outcome)


class Runner:
    """Runs functions one after the other in one thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._present: Work | None = None
        self.waiting = 0
        """Functions that have not returned."""

    async def call(self, run: Callable[[], Any], begins: Callable[[], None]) -> Any:
        """Return the result of `run`; `begins` is called before it, in the thread."""
        work = Work(run, begins, asyncio.get_running_loop().create_future())
        self.waiting += 1
        self._queue.put(work)
        try:
            return await asyncio.shield(work.done)
        except asyncio.CancelledError:
            work.given_up = True
            if self._present is work:
                await self.give_up(work)
            raise
        finally:
            self.waiting -= 1

    def serve(self) -> None:
        while True:
            with contextlib.suppress(GivenUp):  # may be raised after its function
                work = self._queue.get()
                if work is None:
                    return
                self._present = work
                if work.given_up:
                    work.settle(work.done.set_result, None)
                else:
                    work.do()
                self._present = None

    def stop(self) -> None:
        self._queue.put(None)

    async def give_up(self, work: Work) -> None:
        """Raise `GivenUp` in the thread."""
        raise NotImplementedError


class MainThread(Runner):
    """Main thread of a task process."""

    def __init__(self) -> None:
        super().__init__()
        self.serves = False

    def accept(self) -> None:
        """Take functions from now on; they wait for `serve`."""
        signal.signal(INTERRUPT, self._raise)
        self.serves = True

    async def give_up(self, work: Work) -> None:
        """See `Runner`; return when the thread is free."""
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, INTERRUPT)
        await asyncio.wait([work.done])

    def _raise(self, *_: object) -> None:
        if self._present is not None and self._present.given_up:
            raise GivenUp


class _Thread(Runner):
    def __init__(self) -> None:
        super().__init__()
        self.given_up = False
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    async def give_up(self, work: Work) -> None:
        self.given_up = True
        ident = ctypes.c_ulong(self.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(GivenUp))
        self.stop()


class Threads:
    """Thread pool for blocking functions, used in the loop."""

    def __init__(self, most: int) -> None:
        self._room = asyncio.Semaphore(most)
        self._home: asyncio.AbstractEventLoop | None = None
        self._idle: list[_Thread] = []
        self._given_up: set[threading.Thread] = set()

    @property
    def hung(self) -> int:
        self._given_up = {thread for thread in self._given_up if thread.is_alive()}
        return len(self._given_up)

    async def call(self, run: Callable[[], Any], context: CallContext) -> Any:
        """Return the result of `run`, called in a thread when one is free."""
        loop = asyncio.get_running_loop()
        self._home = self._home or loop
        if loop is not self._home:  # a loop of users' code, in a thread that already counts
            return await self._call(run, context)
        if self._room.locked():
            context.report("waiting")
        async with self._room:
            return await self._call(run, context)

    async def _call(self, run: Callable[[], Any], context: CallContext) -> Any:
        thread = self._idle.pop() if self._idle else _Thread()
        try:
            return await thread.call(run, partial(context.report, "running"))
        finally:
            if thread.given_up:
                self._given_up.add(thread.thread)
            else:
                self._idle.append(thread)


@dataclass(slots=True, kw_only=True, eq=False)
class CallContext:
    """Threads of a call's functions, and its state."""

    threads: Threads
    threaded: bool = False
    """Run functions in threads, not in the main thread."""
    tell: Callable[[CallState], None] = field(default=lambda state: None)
    """Called with each new state."""
    state: CallState = "sent"

    def report(self, state: CallState) -> None:
        if state != self.state:
            self.state = state
            self.tell(state)


ELSEWHERE: Final = CallContext(threads=Threads(THREADS_ELSEWHERE))

CONTEXT: Final[ContextVar[CallContext]] = ContextVar("context")

MAIN: Final = MainThread()
"""Main thread of a task process."""


async def call_user_code(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the awaited result of a user's function, called where `CONTEXT` says."""
    context = CONTEXT.get(ELSEWHERE)
    if context.threaded or inspect.iscoroutinefunction(function):
        return await call_in_thread(function, *arguments)
    if not MAIN.serves or threading.current_thread() is threading.main_thread():
        return await _awaited(context, function(*arguments))
    if MAIN.waiting and context.state != "sent":
        context.report("waiting")
    run = partial(copy_context().run, function, *arguments)
    return await _awaited(context, await MAIN.call(run, partial(context.report, "main")))


async def call_in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Same as `call_user_code`, in a thread unless the function is `async`."""
    context = CONTEXT.get(ELSEWHERE)
    if inspect.iscoroutinefunction(function):
        return await _awaited(context, function(*arguments))
    run = partial(copy_context().run, function, *arguments)
    return await _awaited(context, await context.threads.call(run, context))


async def _awaited(context: CallContext, result: Any) -> Any:
    if not inspect.isawaitable(result):
        return result
    context.report("running")
    return await result
