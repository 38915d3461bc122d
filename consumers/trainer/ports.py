"""Ports that run effects in threads or in the loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Final, get_args

from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers
from dora_pipe.consumers.trainer.effects import (
    DropFiles,
    PublishPolicy,
    TrainerEffect,
    TrainerEvent,
    WriteHistory,
)
from dora_pipe.consumers.trainer.status import Gauges
from dora_pipe.core.loop.effect_runner import EffectRunner, Handler, ends_role, unanswered
from dora_pipe.core.loop.runtime import PortGroup

EFFECTS_MAX: Final = 4
"""A part, a drop, a snapshot and a restore."""

EVENTS_MAX: Final = 1024
"""Queued events; then the thread waits."""

READ_AHEAD_EVERY_S: Final = 0.5
"""Poll interval of an idle thread; a poll costs about twenty reads."""

CLOSE_S: Final = 5.0
"""Wait on close; a longer step dies with the process."""


class ThreadPort(PortGroup[TrainerEffect, TrainerEvent]):
    """Runs effects in one thread, publishing in another; `poll` raises their errors.

    `open_handlers` is entered in the first thread, with its own bus.
    """

    def __init__(self, open_handlers: Callable[[], AbstractContextManager[EffectHandlers]]) -> None:
        self._open_handlers = open_handlers
        self._gauges = Gauges(0, 0)
        self._handlers: EffectHandlers | None = None
        lossy = (DropFiles, WriteHistory)
        handlers = [
            Handler[TrainerEffect, TrainerEvent](
                effect, self._do, unanswered if effect in lossy else ends_role
            )
            for effect in get_args(TrainerEffect)
        ]
        publisher = EffectRunner[TrainerEffect, TrainerEvent](
            "trainer-publishing", handlers, asked_max=1, close_s=CLOSE_S, finish=False
        )
        worker = EffectRunner[TrainerEffect, TrainerEvent](
            "trainer-work",
            handlers,
            asked_max=EFFECTS_MAX,
            events_max=EVENTS_MAX,
            around=self._opened(),
            idle=self._idle,
            idle_s=READ_AHEAD_EVERY_S,
            close_s=CLOSE_S,
            finish=False,
        )
        working = [effect for effect in get_args(TrainerEffect) if effect is not PublishPolicy]
        # The publisher first: `close` ends it before its handlers.
        super().__init__({PublishPolicy: publisher, **dict.fromkeys(working, worker)})

    def cached(self) -> Gauges:
        return self._gauges

    # In the threads

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._open_handlers() as self._handlers:
            yield

    def _do(self, effect: TrainerEffect) -> Iterator[TrainerEvent | None]:
        assert self._handlers is not None
        for event in self._handlers.run(effect):
            self._gauges = self._handlers.gauges()
            yield event

    def _idle(self) -> Iterator[TrainerEvent]:
        assert self._handlers is not None
        yield from self._handlers.idle()
        self._gauges = self._handlers.gauges()


class InlinePort:
    """Runs effects in the loop, one event per `poll`, for tests and the simulator.

    Two ports may share handlers if one only publishes.
    """

    def __init__(self, handlers: EffectHandlers, *, reads_ahead: bool = True) -> None:
        self._handlers = handlers
        self._reads_ahead = reads_ahead
        self._todo: deque[Iterator[TrainerEvent | None]] = deque(maxlen=EFFECTS_MAX)

    @property
    def busy(self) -> bool:
        return bool(self._todo)

    def start(self, effect: TrainerEffect) -> None:
        """Start an effect at the next `poll`."""
        assert len(self._todo) < EFFECTS_MAX
        self._todo.append(self._handlers.run(effect))

    def poll(self) -> list[TrainerEvent]:
        """Return the next event, if available."""
        if not self._todo:
            return list(self._handlers.idle()) if self._reads_ahead else []
        for event in self._todo[0]:
            return [] if event is None else [event]
        self._todo.popleft()
        return []

    def cached(self) -> Gauges:
        return self._handlers.gauges()

    def close(self) -> None:
        """Drop effects in progress; idempotent."""
        self._todo.clear()
        self._handlers.close()
