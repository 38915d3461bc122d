"""Does what ports are asked to do, beside the loop or in it, and makes an event of every outcome.

A port says in one table, for every type of effect, what does it and what is answered when that
fails. Here is the one place that calls either, so nothing that raises leaves a machine without its
answer: not a device without memory, not a disk that gives no bytes, not a fault of our own. What is
no effect's failure (opening what the thread works with, its idle work) is raised by `poll`, in the
loop, and ends the role. Handlers per exception are not enough: libraries raise anything.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NoReturn

from dora_pipe.core.errors import DoraError, ResourceError, reason

LOG = logging.getLogger(__name__)

ASKED_MAX: Final = 65_536
"""Effects that may wait for the thread of a port; one more fails at once."""

EVENTS_MAX: Final = 65_536
"""Events that may wait for the loop; then the thread waits."""

CLOSE_S: Final = 10.0
"""Closing waits this long for what was asked; what takes longer ends with the process."""

PLACES_MAX: Final = 12
"""Lines of code that the log names for a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handler:
    """How the effects of one type are done.

    Example: ``Handler(do=put, failed=lambda effect, error: [KvPut(request=effect.request, ...)])``
    """

    do: Callable[[Any], Iterable[Any]]
    """Gives the events of an effect, None where it has to wait."""
    failed: Callable[[Any, Exception], Iterable[Any]]
    """The events that take the place of those that did not come: `unanswered` where nobody waits
    for one. What ends the role is raised: `ends_role` where everything does."""


Handlers = Mapping[type[Any], Handler]


def unanswered(effect: Any, error: Exception) -> Iterable[Any]:
    """Nobody waits for this effect's outcome: the line in the log is all."""
    return ()


def ends_role(effect: Any, error: Exception) -> NoReturn:
    """Without this effect the role is of no use; it is started again, or says why not."""
    raise error


def attempt(
    what: str, do: Callable[[], Iterable[Any]], failed: Callable[[Exception], Iterable[Any]]
) -> Iterator[Any]:
    """The events of `do`; whatever it raises is logged and becomes the events of `failed`.

    `what` is what the log calls it. A SystemExit is no way out of a port, and counts as a failure.
    """
    try:
        yield from do()
    except SystemExit as error:
        yield from failed(_logged(what, ResourceError(f"it asked to exit with {error.code!r}")))
    except Exception as error:
        yield from failed(_logged(what, error))


def run_effect(handlers: Handlers, effect: Any) -> Iterator[Any]:
    """The events of an effect, of its failure if it fails; None where it has to wait."""
    handler = handlers[type(effect)]
    return attempt(
        type(effect).__name__, partial(handler.do, effect), partial(handler.failed, effect)
    )


class EffectRunner:
    """Runs the effects of a port in one thread, in order; or at once in the caller (virtual time).

    Example::

        runner = EffectRunner("handover", {PutKv: Handler(do=put, failed=not_put)})
        runner.start(effect)
        events = runner.poll()
    """

    def __init__(
        self,
        name: str,
        handlers: Handlers,
        *,
        in_thread: bool = True,
        asked_max: int = ASKED_MAX,
        events_max: int = EVENTS_MAX,
        around: AbstractContextManager[Any] | None = None,
        idle: Callable[[], Iterable[Any]] | None = None,
        idle_s: float | None = None,
    ) -> None:
        """The thread is entered into `around`, and starts at once where there is one; `idle` is
        called there after every `idle_s` seconds without an effect."""
        self._name = name
        self._handlers = handlers
        self._in_thread = in_thread
        self._asked_max = asked_max
        self._events_max = events_max
        self._around = around
        self._idle = idle
        self._idle_s = idle_s
        self._turn = threading.Condition()
        self._asked: deque[Any] = deque()
        self._events: deque[Any] = deque()
        self._open = 0
        self._closing = False
        self._leave_asked = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if around is not None:
            self._begin()

    @property
    def effects(self) -> tuple[type, ...]:
        return tuple(self._handlers)

    @property
    def working(self) -> bool:
        """Whether an effect has not ended; afterwards all its events are there."""
        return self._open > 0

    @property
    def busy(self) -> bool:
        """Whether there are events to poll."""
        return bool(self._events)

    def start(self, effect: Any) -> None:
        """Do it, or have it done. What there is no room for has failed."""
        if not self._in_thread:
            done = run_effect(self._handlers, effect)
            self._events.extend(one for one in done if one is not None)
            return
        with self._turn:
            full = len(self._asked) >= self._asked_max
            if not full:
                self._asked.append(effect)
                self._open += 1
                self._turn.notify_all()
        if full:
            what, failed = type(effect).__name__, self._handlers[type(effect)].failed
            error = ResourceError(f"{self._asked_max} effects wait already")
            self._events.extend(failed(effect, _logged(what, error)))
        elif self._thread is None:
            self._begin()

    def poll(self) -> list[Any]:
        """Events since the last call. Raises what has ended the thread, behind its last event."""
        error = self._error  # Before the events: whoever set it has put its last one there.
        if not self._events:  # Most polls bring nothing, and take no lock for it.
            if error is not None:
                raise error
            return []
        with self._turn:
            events = list(self._events)
            self._events.clear()
            self._turn.notify_all()
        return events

    def close(self, *, wait_s: float = CLOSE_S, finish: bool = True) -> None:
        """End the thread: with `finish` behind all that was asked, else between two events.

        Idempotent. What takes longer than `wait_s` ends with the process.
        """
        with self._turn:
            self._closing, self._leave_asked = True, self._leave_asked or not finish
            self._turn.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(wait_s)
            if thread.is_alive():
                LOG.warning("the thread %s is still busy; it ends with the process", self._name)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    # In the thread

    def _run(self) -> None:
        try:
            with self._around or nullcontext():
                while (events := self._next()) is not None:
                    self._put(events)
        except BaseException as error:  # nobody but `poll` can tell it
            self._error = error

    def _next(self) -> Iterable[Any] | None:
        """What is to be done now, as its events; None: nothing any more."""
        with self._turn:
            if not self._asked and not self._closing:
                self._turn.wait(self._idle_s)
            if self._leave_asked or (self._closing and not self._asked):
                return None
            if self._asked:
                return self._doing(self._asked.popleft())
        return self._idle() if self._idle is not None else ()

    def _doing(self, effect: Any) -> Iterator[Any]:
        try:
            yield from run_effect(self._handlers, effect)
        finally:
            with self._turn:
                self._open -= 1

    def _put(self, events: Iterable[Any]) -> None:
        """Hand events to the loop; where it does not take them, wait until it does."""
        for event in events:
            with self._turn:
                while len(self._events) >= self._events_max and not self._closing:
                    self._turn.wait()
                if self._leave_asked:
                    return
                if event is not None:
                    self._events.append(event)


def _logged(what: str, error: Exception) -> Exception:
    """The error, after the log has it: a fault of our own with the places that it came through."""
    places = "" if isinstance(error, DoraError) else _places(error)
    LOG.warning("%s failed: %s%s", what, reason(error), places)
    return error


def _places(error: Exception) -> str:
    """Where it came through, innermost last, without what a library says at length."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES_MAX:]
    return "".join(f"\n  {one.filename}:{one.lineno} in {one.name}" for one in frames)
