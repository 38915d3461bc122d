"""Where a task process does what it need not do one after the other: an asyncio loop in a thread of
its own, and threads for functions that would block it. Decides nothing.

A call is a coroutine. It starts in the main thread and stays there as long as users' functions
give their results at once; where one gives an awaitable, the call goes on in the loop, from
exactly there (`call_user_code`).

Nothing can end a thread from outside. One whose result nobody waits for any more is *hung*; so
many of them (`HUNG_MAX`) are borne before the process asks to be replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Final

HUNG_MAX: Final = 8
"""Threads that a process holds for nobody."""

_HUNG: ContextVar[set[threading.Thread]] = ContextVar("hung")


class Background:
    """A loop in a thread of its own. Make it in the main thread, before any call.

    Example::

        background = Background()
        background.run(server.answered(call))
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._hung: set[threading.Thread] = set()
        _HUNG.set(self._hung)

    @property
    def hung(self) -> int:
        """Threads that still run although nobody waits for them."""
        return sum(thread.is_alive() for thread in list(self._hung))

    def run(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Go on with a coroutine in the loop; `cancel` of what this gives cancels it."""
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
    """What a user's function gives, or what that awaits to.

    In the main thread the function is called there, and an awaitable is awaited in the loop, behind
    a `ContinueInLoop`. In the loop a function that may block is called in a thread.
    """
    inside = in_loop()
    if inside and not inspect.iscoroutinefunction(function):
        found = await in_thread(function, *arguments)
    else:
        found = function(*arguments)
    if inspect.isawaitable(found):
        if not inside:
            await ContinueInLoop()
        found = await found
    return found


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in a thread of its own; cancelled, the thread is left alone and counted."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_it(outcome)

    def call() -> None:
        set_it: Callable[[Any], None] = done.set_exception
        outcome: Any
        try:
            outcome, set_it = function(*arguments), done.set_result
        except StopIteration as error:  # no future takes one
            outcome = RuntimeError(f"it raised StopIteration: {error}")
        except BaseException as error:  # who awaits it gets it, as if he had called
            outcome = error
        with contextlib.suppress(RuntimeError):  # the loop is gone: the process ends
            loop.call_soon_threadsafe(tell, set_it, outcome)

    thread = threading.Thread(target=copy_context().run, args=(call,), daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        hung = _HUNG.get(set())
        hung.difference_update([one for one in hung if not one.is_alive()])
        if thread.is_alive():
            hung.add(thread)
        raise
