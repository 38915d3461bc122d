"""Ports delayed in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from dora_pipe.config.logged import MINIBATCHES
from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers
from dora_pipe.consumers.trainer.effects import (
    PublishPolicy,
    TrainerEffect,
    TrainerEvent,
    TrainPart,
)
from dora_pipe.consumers.trainer.ports import InlinePort
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.loop.runtime import Port, PortGroup
from dora_pipe.core.system.clock import Clock
from dora_pipe.sim.role import NEVER_NS


class PacedPort:
    """Port that computes in the loop, with delays of events (`delay_ns`) and polls (`again_ns`)."""

    def __init__(
        self,
        inner: Port[Any, Any],
        clock: Clock,
        *,
        delay_ns: Callable[[Any], int],
        again_ns: Callable[[], int],
    ) -> None:
        self._inner = inner
        self._clock = clock
        self._delay_ns = delay_ns
        self._again_ns = again_ns
        self._due_ns = 0

    def start(self, effect: Any) -> None:
        self._due_ns = max(self._due_ns, self._clock.now_ns() + self._delay_ns(effect))
        self._inner.start(effect)

    def poll(self) -> list[Any]:
        if not self._inner.busy:
            return list(self._inner.poll())
        now_ns = self._clock.now_ns()
        if now_ns < self._due_ns:
            return []
        events = list(self._inner.poll())
        self._due_ns = now_ns + self._again_ns()
        return events

    @property
    def busy(self) -> bool:
        return self._inner.busy and self._clock.now_ns() >= self._due_ns

    def due_ns(self) -> int:
        return self._due_ns if self._inner.busy else NEVER_NS

    def close(self) -> None:
        self._inner.close()


class PublishingPort(PacedPort):
    def __init__(
        self, inner: Port[Any, Any], clock: Clock, delay_ns: Callable[[Any], int], again_ns: int
    ) -> None:
        super().__init__(inner, clock, delay_ns=delay_ns, again_ns=lambda: again_ns)
        self.writing = False

    def start(self, effect: Any) -> None:
        self.writing = True
        super().start(effect)

    def poll(self) -> list[Any]:
        events = super().poll()
        self.writing &= not events
        return events


class WorkingPort(PacedPort):
    """Port for other work. Raises InvariantBroken if it changes weights being written."""

    def __init__(
        self,
        inner: Port[Any, Any],
        clock: Clock,
        delay_ns: Callable[[Any], int],
        again_ns: int,
        publishing: PublishingPort,
    ) -> None:
        super().__init__(inner, clock, delay_ns=delay_ns, again_ns=lambda: again_ns)
        self._publishing = publishing

    def start(self, effect: Any) -> None:
        if isinstance(effect, TrainPart) and self._publishing.writing:
            decision = effect.decision
            if int(decision.settings.get(MINIBATCHES, 1)) > 1:
                what = f"part {decision.part} of step {decision.step} is an update"
                raise InvariantBroken(f"written: {what}, and its weights are being written")
        super().start(effect)


class TrainerPorts(PortGroup[TrainerEffect, TrainerEvent]):
    """Separate ports for work and publishing, as in production."""

    def __init__(
        self,
        handlers: EffectHandlers,
        clock: Clock,
        delay_ns: Callable[[TrainerEffect], int],
        again_ns: int,
    ) -> None:
        work, publishing = InlinePort(handlers), InlinePort(handlers, reads_ahead=False)
        publishing_port = PublishingPort(publishing, clock, delay_ns, again_ns)
        working_port = WorkingPort(work, clock, delay_ns, again_ns, publishing_port)
        self.cached = work.cached
        ports = dict.fromkeys(get_args(TrainerEffect), working_port)
        super().__init__({**ports, PublishPolicy: publishing_port})
