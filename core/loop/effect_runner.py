"""Runner of port effects in a thread or inline; every outcome becomes an event.

A port maps each effect type to a handler and to events on failure, so a machine always gets its
reply. Errors outside effects (setup, idle work) are raised by `poll` and end the role.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Never, NoReturn, TypeVar

from dora_pipe.bus.bus import Writer
from dora_pipe.core.errors import BusError, DoraError, ResourceError, reason
from dora_pipe.core.pure.machine import Effect, Event
from dora_pipe.core.pure.records import Append

LOG = logging.getLogger(__name__)

ASKED_MAX: Final = 65_536
"""Maximum queued effects; more fail."""

EVENTS_MAX: Final = 65_536
"""Maximum queued events; then the thread waits."""

CLOSE_S: Final = 10.0
PLACES_MAX: Final = 12
"""Maximum source lines per failure."""

EventOut = TypeVar("EventOut", covariant=True)


@dataclass(frozen=True)
class Handler(Generic[Effect, EventOut]):
    """Handler of one effect type."""

    effect: type[Effect]
    do: Callable[[Effect], Iterable[EventOut | None]]
    """Yields events of an effect, None to wait."""
    failed: Callable[[Effect, Exception], Iterable[EventOut]]
    """Returns replacement events, or raises."""

    def run(self, effect: Effect) -> Iterator[EventOut | None]:
        """Yield the events of an effect or of its failure."""
        do, failed = partial(self.do, effect), partial(self.failed, effect)
        return attempt(type(effect).__name__, do, failed)


def unanswered(effect: object, error: Exception) -> Iterable[Never]:
    """Return no events."""
    return ()


def ends_role(effect: object, error: Exception) -> NoReturn:
    """Raise the error, which ends the role."""
    raise error


def attempt(
    what: str, do: Callable[[], Iterable[Event]], failed: Callable[[Exception], Iterable[Event]]
) -> Iterator[Event]:
    """Yield the events of `do`; on any exception, including SystemExit, log it as `what` and yield
    those of `failed`."""
    try:
        yield from do()
    except SystemExit as error:
        yield from failed(_logged(what, ResourceError(f"it called exit with {error.code!r}")))
    except Exception as error:
        yield from failed(_logged(what, error))


class EffectRunner(Generic[Effect, Event]):
    """Runner of a port's effects in order, in one thread or inline (virtual time).

    Example::

        runner = EffectRunner("handover", [Handler(PutKv, put, not_put)])
        runner.start(effect)
        events = runner.poll()
    """

    def __init__(
        self,
        name: str,
        handlers: Iterable[Handler[Any, Event]],
        *,
        in_thread: bool = True,
        asked_max: int = ASKED_MAX,
        events_max: int = EVENTS_MAX,
        around: AbstractContextManager[Any] | None = None,
        idle: Callable[[], Iterable[Event]] | None = None,
        idle_s: float | None = None,
        close_s: float = CLOSE_S,
        finish: bool = True,
    ) -> None:
        """Create a runner; a thread enters `around` at once and calls `idle` every `idle_s` without
        effects. `close` takes up to `close_s`, after all queued effects with `finish`."""
        self._name = name
        self._handlers = {handler.effect: handler for handler in handlers}
        self._in_thread = in_thread
        self._asked_max = asked_max
        self._events_max = events_max
        self._around = around
        self._idle = idle
        self._idle_s = idle_s
        self._close_s = close_s
        self._finish = finish
        self._turn = threading.Condition()
        self._asked: deque[Effect] = deque()
        self._events: deque[Event] = deque()
        self._open = 0
        self._closing = False
        self._leave_asked = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if around is not None:
            self._begin()

    @property
    def working(self) -> bool:
        return self._open > 0

    @property
    def busy(self) -> bool:
        return bool(self._events)

    def start(self, effect: Effect) -> None:
        """Run or queue an effect; fail it if the queue is full."""
        handler = self._handlers[type(effect)]
        if not self._in_thread:
            self._events.extend(event for event in handler.run(effect) if event is not None)
            return
        with self._turn:
            full = len(self._asked) >= self._asked_max
            if not full:
                self._asked.append(effect)
                self._open += 1
                self._turn.notify_all()
        if full:
            error = ResourceError(f"{self._asked_max} effects are already waiting")
            self._events.extend(handler.failed(effect, _logged(type(effect).__name__, error)))
        elif self._thread is None:
            self._begin()

    def poll(self) -> list[Event]:
        """Return new events. Raises the thread's error after its last event."""
        error = self._error  # read before the events: it is set after them
        if not self._events:  # fast path without the lock
            if error is not None:
                raise error
            return []
        with self._turn:
            events = list(self._events)
            self._events.clear()
            self._turn.notify_all()
        return events

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for an event or the end of an effect."""
        with self._turn:
            if self._open and not self._events:
                self._turn.wait(seconds)

    def close(self) -> None:
        """End the thread; idempotent. A thread that takes too long dies with the process."""
        with self._turn:
            self._closing, self._leave_asked = True, not self._finish
            self._turn.notify_all()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(self._close_s)
            if thread.is_alive():
                LOG.warning("thread %s is still busy and ends with the process", self._name)

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    # In the thread

    def _run(self) -> None:
        try:
            with self._around or nullcontext():
                while (events := self._next()) is not None:
                    self._put(events)
        except BaseException as error:  # only `poll` can raise it
            self._error = error

    def _next(self) -> Iterable[Event | None] | None:
        with self._turn:
            if not self._asked and not self._closing:
                self._turn.wait(self._idle_s)
            if self._leave_asked or (self._closing and not self._asked):
                return None
            if self._asked:
                return self._doing(self._asked.popleft())
        return self._idle() if self._idle is not None else ()

    def _doing(self, effect: Effect) -> Iterator[Event | None]:
        try:
            yield from self._handlers[type(effect)].run(effect)
        finally:
            with self._turn:
                self._open -= 1
                self._turn.notify_all()

    def _put(self, events: Iterable[Event | None]) -> None:
        for event in events:
            with self._turn:
                while len(self._events) >= self._events_max and not self._closing:
                    self._turn.wait()
                if self._leave_asked:
                    return
                if event is not None:
                    self._events.append(event)
                    self._turn.notify_all()


def _logged(what: str, error: Exception) -> Exception:
    places = "" if isinstance(error, DoraError) else _places(error)
    LOG.warning("%s failed: %s%s", what, reason(error), places)
    return error


def _places(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-PLACES_MAX:]
    return "".join(f"\n  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)


CLOSE_LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _AppendLossy:
    records: Sequence[Append]


class BackgroundWriter:
    """Non-blocking wrapper of a plain writer; drops records while an append is running."""

    def __init__(self, inner: Writer) -> None:
        self._inner = inner
        handler = Handler(_AppendLossy, self._append, lambda effect, error: [error])
        self._runner = EffectRunner[_AppendLossy, Exception](
            "status", [handler], asked_max=1, close_s=CLOSE_LIMIT_S
        )

    def append(self, records: Sequence[Append]) -> list[int]:
        """Return at once without offsets. Raises the error of the last append."""
        if self._runner.working:
            return []
        failed = self._runner.poll()
        self._runner.start(_AppendLossy(records))
        for error in failed:
            raise error
        return []

    def close(self) -> None:
        """Wait shortly for the running append, then close."""
        self._runner.close()
        self._inner.close()

    def _append(self, effect: _AppendLossy) -> Iterable[BusError]:
        try:
            self._inner.append(effect.records)
        except BusError as error:  # the runtime logs it
            return [error]
        return ()
