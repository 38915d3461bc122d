"""Ports in virtual time: production's own ports at a pace, and a task without processes.

A port of a world says by `due_ns` when it has something to report. They decide how long things
take, nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Protocol

from dora_pipe.core.clock import Clock
from dora_pipe.core.runtime import Meter, Port
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    Forget,
    PromptCall,
    PromptReady,
    TaskCall,
    TaskEvent,
)
from dora_pipe.schemas.metrics import Cost
from dora_pipe.sim.clock import NEVER_NS


class SimPort(Port, Protocol):
    """A port that knows when it has something to say."""

    def due_ns(self) -> int:
        """Monotonic ns (the role's clock) of its next event; `NEVER_NS` while it waits for none."""
        ...


_UNTIMED: Final = nullcontext()


class StillMeter(Meter):
    """Costs are real time, which must not enter a world: here nothing costs anything."""

    def __init__(self) -> None:
        super().__init__()
        self._none = Cost(total_s=0.0, bus_s=0.0, control_s=0.0, codec_s=0.0, rss_bytes=0)

    def spend(self, name: str) -> AbstractContextManager[None]:
        """No clock is looked at."""
        return _UNTIMED

    def cost(self) -> Cost:
        """Nothing."""
        return self._none


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
        """Begin an effect."""
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
        """See `SimPort`."""
        return self._due_ns if self._inner.busy else NEVER_NS

    def close(self) -> None:
        """Close the inner port."""
        self._inner.close()


class Numbers:
    """A tokenizer without files: text is token ids in decimal."""

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        return self.ids(text)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text."""
        return [int(word) for word in text.split()]

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        return " ".join(map(str, token_ids))


class SimTasks:
    """A task pool without processes: every call is answered by `answer`, after `delay_ns` of it.

    Calls of an episode end with its `EnvStep`s as `answer` says. What is forgotten is not answered.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        answer: Callable[[TaskCall], TaskEvent],
        delay_ns: Callable[[TaskCall], int],
    ) -> None:
        self._clock = clock
        self._answer = answer
        self._delay_ns = delay_ns
        self._calls: dict[str, tuple[int, TaskCall]] = {}
        self._due_ns = NEVER_NS

    @property
    def busy(self) -> bool:
        """Whether an answer is due."""
        return self._clock.now_ns() >= self._due_ns

    def due_ns(self) -> int:
        """When the next answer is due."""
        return self._due_ns

    def start(self, effect: TaskCall | Forget) -> None:
        """Take a call, or forget one."""
        if isinstance(effect, Forget):
            if self._calls.pop(effect.request, None) is not None:
                self._settle()
            return
        due_ns = self._clock.now_ns() + self._delay_ns(effect)
        self._calls[effect.request] = due_ns, effect
        self._due_ns = min(self._due_ns, due_ns)

    def poll(self) -> Sequence[TaskEvent]:
        """The answers that are due, in the order of the calls."""
        if not self.busy:
            return ()
        now_ns = self._clock.now_ns()
        ready = [name for name, (due_ns, _) in self._calls.items() if due_ns <= now_ns]
        events = [self._answer(self._calls.pop(name)[1]) for name in ready]
        self._settle()
        return events

    def close(self) -> None:
        """Forget everything."""
        self._calls.clear()
        self._due_ns = NEVER_NS

    def _settle(self) -> None:
        self._due_ns = min((due_ns for due_ns, _ in self._calls.values()), default=NEVER_NS)


def prompt_of(call: PromptCall, *, episode: bool = False) -> PromptReady:
    """A prompt of three to six tokens that tells the row."""
    row = call.index
    words = [3 + row % 89, 4 + row // 89 % 89, 5 + row % 7]
    text = " ".join(map(str, words + words[: row % 4]))
    return PromptReady(request=call.request, text=text, episode=episode)


def observed_of(call: EnvStep, *, done: bool) -> EnvObserved:
    """Two tokens of a tool."""
    return EnvObserved(request=call.request, text="8 9", done=done, tool="tool", ok=True)


class TimedTaskPort:
    """Production's task port on `SimTasks`, with its due time."""

    def __init__(self, inner: Port, tasks: SimTasks) -> None:
        self.effects = inner.effects
        self.start = inner.start
        self.poll = inner.poll
        self.close = inner.close
        self._tasks = tasks

    @property
    def busy(self) -> bool:
        """Whether an answer is due."""
        return self._tasks.busy

    def due_ns(self) -> int:
        """See `SimPort`."""
        return self._tasks.due_ns()
