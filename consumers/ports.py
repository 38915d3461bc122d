"""Two ways to run the trainer's work: in a thread of its own, or step by step in the loop.

They decide nothing but when: a step may take minutes, and heartbeats must go on meanwhile. Between
effects the thread reads ahead, so that a batch is in memory when it is decided.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final

from dora_pipe.consumers.effects import Effect, Event
from dora_pipe.consumers.status import Gauges
from dora_pipe.consumers.work import EFFECTS, TrainerWork
from dora_pipe.runtime import Meter

LOG = logging.getLogger(__name__)

EFFECTS_MAX: Final = 4
"""Effects that may wait for the thread; the machine has at most one under way."""

EVENTS_MAX: Final = 1024
"""Events that may wait for the loop; then the thread waits."""

READ_AHEAD_EVERY_S: Final = 0.5
"""A thread without an effect looks at the log this often; what came since is read when it is
wanted. Looking costs about as much as reading twenty records."""

WAIT_S: Final = 0.1
"""One wait of the thread for room among the events; closing is noticed after each."""

CLOSE_S: Final = 5.0
"""Closing waits this long for the thread; a step that takes longer dies with the process."""


class ThreadPort:
    """Runs `TrainerWork` in one thread; `open_work` is entered in it, so that its bus is its own.

    An error of the thread is raised by `poll`, in the loop, and ends the role.
    """

    effects: tuple[type, ...] = EFFECTS

    def __init__(
        self, open_work: Callable[[Meter], AbstractContextManager[TrainerWork]], meter: Meter
    ) -> None:
        self._open_work = open_work
        self._meter = meter
        self._own = Meter()
        self._booked = {"bus": 0.0, "codec": 0.0}
        self._todo: queue.Queue[Effect] = queue.Queue(maxsize=EFFECTS_MAX)
        self._events: queue.Queue[Event] = queue.Queue(maxsize=EVENTS_MAX)
        self._errors: list[BaseException] = []
        self._gauges = Gauges(0, 0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer-work", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """The loop never has to hurry for a thread."""
        return False

    def start(self, effect: Any) -> None:
        """Hand an effect to the thread."""
        self._todo.put_nowait(effect)

    def poll(self) -> list[Any]:
        """Events since the last call. Raises what ended the thread."""
        self._book()
        events: list[Any] = []
        while not self._events.empty():
            events.append(self._events.get_nowait())
        if self._errors and not events:
            raise self._errors[0]
        return events

    def cached(self) -> Gauges:
        """How it is with the batch reader and its cache."""
        return self._gauges

    def close(self) -> None:
        """Stop the thread where it stands between two events; idempotent."""
        self._closing.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            LOG.warning("the trainer's thread is still busy; it ends with the process")

    def _book(self) -> None:
        """Add to the role's books what the thread has spent since the last time."""
        cost = self._own.cost()
        for name, spent_s in (("bus", cost.bus_s), ("codec", cost.codec_s)):
            self._meter.add(name, spent_s - self._booked[name])
            self._booked[name] = spent_s

    # In the thread

    def _run(self) -> None:
        with _Carry(self._errors), self._open_work(self._own) as work:
            while not self._closing.is_set():
                self._turn(work)

    def _turn(self, work: TrainerWork) -> None:
        try:
            effect = self._todo.get(timeout=READ_AHEAD_EVERY_S)
        except queue.Empty:
            self._report(work, work.idle())
            self._gauges = work.gauges()
        else:
            self._report(work, work.run(effect))

    def _report(self, work: TrainerWork, events: Iterator[Event | None]) -> None:
        for event in events:
            self._gauges = work.gauges()
            if self._closing.is_set():
                return
            if event is not None:
                self._put(event)

    def _put(self, event: Event) -> None:
        while not self._closing.is_set():
            try:
                return self._events.put(event, timeout=WAIT_S)
            except queue.Full:
                continue


class InlinePort:
    """Runs `TrainerWork` in the loop, a bit per `poll`: for tests and the simulator."""

    effects: tuple[type, ...] = EFFECTS

    def __init__(self, work: TrainerWork) -> None:
        self._work = work
        self._todo: deque[Iterator[Event | None]] = deque(maxlen=EFFECTS_MAX)

    @property
    def busy(self) -> bool:
        """Whether an effect is under way."""
        return bool(self._todo)

    def start(self, effect: Any) -> None:
        """Begin an effect with the next `poll`."""
        assert len(self._todo) < EFFECTS_MAX
        self._todo.append(self._work.run(effect))

    def poll(self) -> list[Any]:
        """The next event of the present effect, if there is one already."""
        if not self._todo:
            return list(self._work.idle())
        for event in self._todo[0]:
            return [] if event is None else [event]
        self._todo.popleft()
        return []

    def cached(self) -> Gauges:
        """How it is with the batch reader and its cache."""
        return self._work.gauges()

    def close(self) -> None:
        """Drop what is under way; idempotent."""
        self._todo.clear()
        self._work.close()


class _Carry:
    """Carries whatever ends the thread over to the loop, where the role ends with it."""

    def __init__(self, errors: list[BaseException]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if error is not None:
            self._errors.append(error)
        return True
