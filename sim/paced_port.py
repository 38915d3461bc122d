"""Ports that compute in the loop, slowed down to virtual time; decides what the trainer may compute
while a policy is published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dora_pipe.config.logged import MINIBATCHES
from dora_pipe.consumers.trainer.effects import TrainPart
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.runtime import Port
from dora_pipe.sim.role import NEVER_NS


class PacedPort:
    """A port that computes in the loop, slowed down to virtual time.

    `delay_ns` says how long an effect takes before its first event can come, `again_ns` how long it
    is from one poll to the next while the port is busy.
    """

    def __init__(
        self,
        inner: Port,
        clock: Clock,
        *,
        delay_ns: Callable[[Any], int],
        again_ns: Callable[[], int],
    ) -> None:
        self.effects = inner.effects
        self._inner = inner
        self._clock = clock
        self._delay_ns = delay_ns
        self._again_ns = again_ns
        self._due_ns = 0

    def start(self, effect: Any) -> None:
        self._due_ns = max(self._due_ns, self._clock.now_ns() + self._delay_ns(effect))
        self._inner.start(effect)

    def poll(self) -> list[Any]:
        """The inner port's events, when it is time."""
        if not self._inner.busy:
            return self._inner.poll()
        now_ns = self._clock.now_ns()
        if now_ns < self._due_ns:
            return []
        events = self._inner.poll()
        self._due_ns = now_ns + self._again_ns()
        return events

    @property
    def busy(self) -> bool:
        """Whether there is something to do now."""
        return self._inner.busy and self._clock.now_ns() >= self._due_ns

    def due_ns(self) -> int:
        return self._due_ns if self._inner.busy else NEVER_NS

    def close(self) -> None:
        self._inner.close()


class PublishingPort(PacedPort):
    """Publishes policies of a trainer; `writing` while it has not said that one is written."""

    def __init__(
        self, inner: Port, clock: Clock, delay_ns: Callable[[Any], int], again_ns: int
    ) -> None:
        super().__init__(inner, clock, delay_ns=delay_ns, again_ns=lambda: again_ns)
        self.writing = False

    def start(self, effect: Any) -> None:
        self.writing = True
        super().start(effect)

    def poll(self) -> list[Any]:
        """What was published, when it is time."""
        events = super().poll()
        self.writing &= not events
        return events


class WorkingPort(PacedPort):
    """Does what else a trainer does. Raises InvariantBroken where that would change the weights
    that are being written."""

    def __init__(
        self,
        inner: Port,
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
