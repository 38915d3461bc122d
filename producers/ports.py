"""The worker's ports to its engine and its task pool.

They decide how much is done at a time, nothing else. All but the loading of weights happens in the
loop's own thread, in bounded bits: tokens for `STEP_NS` at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from dora_pipe.clock import Clock
from dora_pipe.errors import DoraError, ResourceError
from dora_pipe.producers.effects import (
    DropWeights,
    EngineAdd,
    EngineCancel,
    EngineExport,
    EngineExported,
    EngineStarted,
    LoadFailed,
    LoadWeights,
    Observed,
    Prompted,
    Score,
    StepEnvironment,
)
from dora_pipe.producers.engines.port import Engine, EngineRequest, RequestFinished
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    Forget,
    PromptCall,
    PromptReady,
    RewardCall,
    TaskCall,
    TaskEvent,
)

STEP_NS: Final = 10_000_000
"""The engine steps until so much time has passed, so that a turn of the loop costs little beside
it; no slot waits for that, the port has requests ahead."""

STEPS_MAX: Final = 64
"""Steps in one poll, also where no time passes."""

CLOSE_S: Final = 30.0
"""Closing waits so long for weights that are being loaded."""


class Tasks(Protocol):
    """What the task port needs of a `TaskPool`."""

    @property
    def busy(self) -> bool:
        """Whether it has work for the next poll."""
        ...

    def start(self, effect: TaskCall | Forget) -> None:
        """Begin a call."""
        ...

    def poll(self) -> Sequence[TaskEvent]:
        """Events since the last call."""
        ...

    def close(self) -> None:
        """Stop."""
        ...


class Texts(Protocol):
    """What the task port needs of a `Tokenizer`."""

    def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a prompt."""
        ...

    def ids(self, text: str) -> list[int]:
        """Token ids of a text that is appended."""
        ...

    def text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens."""
        ...


class EnginePort:
    """Drives an engine, and refills its slots between two steps from the requests it was handed.

    With `in_thread`, weights are loaded beside the loop.
    """

    effects: tuple[type, ...] = (EngineAdd, EngineCancel, EngineExport, DropWeights, LoadWeights)

    def __init__(
        self,
        engine: Engine,
        weights_path: Callable[[str], Path],
        *,
        clock: Clock,
        in_thread: bool = True,
        steps_max: int = STEPS_MAX,
    ) -> None:
        self._engine = engine
        self._weights_path = weights_path
        self._clock = clock
        self._in_thread = in_thread
        self._steps_max = steps_max
        self._events: list[Any] = []
        self._ahead: dict[str, EngineRequest] = {}
        self._loading: threading.Thread | None = None
        self._loaded: list[Any] = []
        self._later: list[EngineCancel | EngineExport | DropWeights] = []  # it is being loaded

    def start(
        self, effect: EngineAdd | EngineCancel | EngineExport | DropWeights | LoadWeights
    ) -> None:
        """See the effects."""
        if isinstance(effect, EngineAdd):
            self._ahead[effect.request.request] = effect.request
        elif isinstance(effect, EngineCancel):
            if self._ahead.pop(effect.request, None) is None:
                self._let_go(effect)
        elif isinstance(effect, EngineExport | DropWeights):
            self._let_go(effect)
        elif self._in_thread:
            assert self._loading is None, "weights are loaded one version at a time"
            self._loading = threading.Thread(
                target=self._load, args=(effect,), name="load-weights", daemon=True
            )
            self._loading.start()
        else:
            self._load(effect)

    def poll(self) -> list[Any]:
        """Steps for the budget; or whether loading has come to an end."""
        events, self._events = self._events, []
        if self._loading is not None:
            if self._loading.is_alive():
                return events
            self._loading.join()
            self._loading = None
        events += self._loaded
        self._loaded = []
        for effect in self._later:
            self._let_go(effect)
        self._later = []
        until_ns = self._clock.now_ns() + STEP_NS
        for _ in range(self._steps_max):
            self._refill(events)
            if not self._engine.active:
                break
            events += self._engine.step()
            if self._clock.now_ns() >= until_ns:
                break
        return events

    @property
    def busy(self) -> bool:
        """Whether there are tokens to sample."""
        return bool(self._events or self._loaded or self._ahead) or self._engine.active > 0

    def close(self) -> None:
        """Wait a while for weights under way. Who made the engine closes it."""
        if self._loading is not None:
            self._loading.join(CLOSE_S)
            self._loading = None

    def _refill(self, events: list[Any]) -> None:
        """Fill free slots in order. A request that the engine refuses has ended with an error."""
        while self._ahead and self._engine.active < self._engine.slots:
            name = next(iter(self._ahead))
            request, why = self._ahead.pop(name), None
            if request.kv is not None:
                why = self._engine.kv_error(request)
                request = request if why is None else replace(request, kv=None)
            started = EngineStarted(
                request=name,
                at_ns=self._clock.wall_ns(),
                imported=request.kv is not None,
                why=why or "",
            )
            events.append(started)
            try:
                self._engine.add(request)
            except ValueError as error:
                events.append(RequestFinished(request=name, reason="error", error=str(error)))

    def _let_go(self, effect: EngineCancel | EngineExport | DropWeights) -> None:
        """Take a request out of its slot, or versions out; not while another thread has the
        engine."""
        if self._loading is not None:
            self._later.append(effect)
        elif isinstance(effect, DropWeights):
            for version in effect.versions:
                self._engine.drop(version)
        elif isinstance(effect, EngineCancel):
            self._engine.cancel(effect.request)
        else:
            self._export(effect.request)

    def _export(self, name: str) -> None:
        """Take a request out. One that has ended tells of that itself."""
        found = self._engine.export(name)
        if found is None:
            return
        if found.sampled is not None:
            self._events.append(found.sampled)
        self._events.append(EngineExported(request=name, kv=found.kv))

    def _load(self, effect: LoadWeights) -> None:
        engine = self._engine
        try:
            path = self._weights_path(effect.digest)
            if effect.keep:
                self._loaded += engine.reload_keeping(
                    path, version=effect.version, digest=effect.digest
                )
            else:
                self._loaded.append(engine.load(path, version=effect.version, digest=effect.digest))
        except DoraError as error:
            here = isinstance(error, ResourceError)
            failed = LoadFailed(version=effect.version, message=error.message, here=here)
            self._loaded.append(failed)
        except (OSError, ValueError) as error:
            self._loaded.append(LoadFailed(version=effect.version, message=str(error)))


class TaskPort:
    """Text on one side, token ids on the other: prompts, environments and rewards."""

    effects: tuple[type, ...] = (PromptCall, StepEnvironment, Score, Forget)

    def __init__(self, tasks: Tasks, texts: Texts) -> None:
        self._tasks = tasks
        self._texts = texts

    def start(self, effect: PromptCall | StepEnvironment | Score | Forget) -> None:
        """Hand a call to the pool."""
        if isinstance(effect, StepEnvironment):
            text = self._texts.text(effect.token_ids)
            self._tasks.start(EnvStep(request=effect.request, text=text))
        elif isinstance(effect, Score):
            self._tasks.start(self._reward_call(effect))
        else:
            self._tasks.start(effect)

    def poll(self) -> list[Any]:
        """The pool's events, texts as token ids."""
        return [self._translated(event) for event in self._tasks.poll()]

    @property
    def busy(self) -> bool:
        """Whether the pool has calls to hand out or events to give."""
        return self._tasks.busy

    def close(self) -> None:
        """Stop the pool."""
        self._tasks.close()

    def _reward_call(self, effect: Score) -> RewardCall:
        answer = self._texts.text(effect.answer)
        single = len(effect.turns) == 1
        turns = (answer,) if single else tuple(map(self._texts.text, effect.turns))
        return RewardCall(
            request=effect.request,
            split=effect.split,
            index=effect.index,
            text=answer,
            turns=turns,
        )

    def _translated(self, event: TaskEvent) -> Any:
        if isinstance(event, PromptReady):
            ids = self._texts.prompt_ids(event.text)
            return Prompted(request=event.request, token_ids=ids, episode=event.episode)
        if isinstance(event, EnvObserved):
            return Observed(
                request=event.request,
                token_ids=self._texts.ids(event.text),
                done=event.done,
                tool=event.tool,
                ok=event.ok,
            )
        return event
