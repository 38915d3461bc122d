"""Worker's port to its engine. Threads fetch and load weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from dora_pipe.core.errors import (
    BusError,
    DoraError,
    InvariantBroken,
    PolicyError,
    ResourceError,
    reason,
)
from dora_pipe.core.loop.effect_runner import (
    EffectRunner,
    Handler,
    attempt,
)
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.engines.engine import (
    Engine,
    EngineRequest,
    RequestFinished,
)
from dora_pipe.producers.worker.effects import (
    DropWeights,
    EngineAdd,
    EngineCancel,
    EngineEffect,
    EngineExport,
    EngineExported,
    EngineFailed,
    EnginePortEvent,
    EngineStarted,
    LoadFailed,
    LoadWeights,
    Sleep,
)

STEP_NS: Final = 10_000_000
"""Time of engine steps in one poll; slots are refilled between steps."""

STEPS_MAX: Final = 64

CLOSE_S: Final = 30.0


class Policies(Protocol):
    """Part of `store.store.PolicyStore` that a worker needs."""

    def weights(self, digest: str) -> Path:
        """Return the weights file of a version."""

    def verify(self, digest: str) -> object:
        """Raises PolicyError if the weights file does not match its digest."""

    def assets(self, digest: str) -> Path:
        """Return the directory of the model's config and tokenizer files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    effect: LoadWeights
    path: Path


class EnginePort:
    """Drives an engine and refills its slots between steps.

    With `in_thread`, rows continue under the current weights until the next file is ready. An
    engine that fails is not used again. If it rejects a file, `verify` removes a damaged copy or
    raises PolicyError, and loading is retried once.
    """

    def __init__(
        self,
        engine: Engine,
        weights_path: Callable[[str], Path],
        *,
        verify: Callable[[str], object] = lambda digest: None,
        clock: Clock,
        in_thread: bool = True,
        steps_max: int = STEPS_MAX,
    ) -> None:
        self._engine = engine
        self._weights_path = weights_path
        self._verify = verify
        self._clock = clock
        self._steps_max = steps_max
        self._events: list[EnginePortEvent] = []
        self._queued: dict[str, EngineRequest] = {}
        self._deferred: list[EngineEffect] = []  # effects deferred while weights load
        self._failed = False
        self._file = Path()  # current or last loaded
        fetch = Handler[LoadWeights, _Fetched | LoadFailed](LoadWeights, self._fetch, _not_loaded)
        self._fetching = EffectRunner[LoadWeights, _Fetched | LoadFailed](
            "fetch-weights", [fetch], in_thread=in_thread, close_s=CLOSE_S
        )
        load = Handler[LoadWeights, EnginePortEvent](LoadWeights, self._load, _not_loaded)
        self._loading = EffectRunner[LoadWeights, EnginePortEvent](
            "load-weights", [load], in_thread=in_thread, close_s=CLOSE_S
        )

    def start(self, effect: EngineEffect) -> None:
        if isinstance(effect, LoadWeights):
            under_way = self._fetching.working or self._loading.working
            assert not under_way, "weights are loaded one version at a time"
            self._fetching.start(effect)
            self._take_fetched()
        elif self._loading.working and not self._is_queued(effect):
            self._deferred.append(effect)  # the thread owns the engine
        else:
            self._run(effect)

    def poll(self) -> list[EnginePortEvent]:
        self._take_fetched()
        if self._loading.working:
            events, self._events = self._events, []
            return events
        self._events += self._loading.poll()
        deferred, self._deferred = self._deferred, []
        for effect in deferred:
            self._run(effect)
        if not self._failed and (self._queued or self._engine.active):
            failed = partial(self._fail, None)
            self._events += attempt("a step of the engine", self._steps, failed)
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        if self._events or self._fetching.busy or self._loading.busy:
            return True
        return not self._failed and (bool(self._queued) or self._engine.active > 0)

    def close(self) -> None:
        """Wait up to `CLOSE_S` for weights; the creator of the engine closes it."""
        self._fetching.close()
        self._loading.close()

    def _take_fetched(self) -> None:
        for event in self._fetching.poll():
            if not isinstance(event, _Fetched):
                self._events.append(event)
            elif not self._failed:
                self._file = event.path
                self._loading.start(event.effect)

    def _is_queued(self, effect: EngineEffect) -> bool:
        return isinstance(effect, EngineAdd) or (
            isinstance(effect, EngineCancel) and effect.request in self._queued
        )

    def _run(self, effect: EngineEffect) -> None:
        do, failed = partial(self._effect_events, effect), partial(self._fail, effect)
        self._events += attempt(type(effect).__name__, do, failed)

    def _steps(self) -> Iterator[EnginePortEvent]:
        until_ns = self._clock.now_ns() + STEP_NS
        for _ in range(self._steps_max):
            yield from self._refill()
            if not self._engine.active:
                break
            yield from self._engine.step()
            if self._clock.now_ns() >= until_ns:
                break

    def _refill(self) -> Iterator[EnginePortEvent]:
        while self._queued and self._engine.active < self._engine.slots:
            name = next(iter(self._queued))
            request, why = self._queued.pop(name), None
            if request.kv is not None:
                why = self._engine.kv_error(request)
                request = request if why is None else replace(request, kv=None)
            yield EngineStarted(
                request=name,
                at_ns=self._clock.wall_ns(),
                imported=request.kv is not None,
                why=why or "",
            )
            try:
                self._engine.add(request)
            except ValueError as error:
                yield RequestFinished(request=name, reason="error", error=str(error))

    def _effect_events(self, effect: EngineEffect) -> Iterator[EnginePortEvent]:
        match effect:
            case EngineAdd():
                self._queued[effect.request.request] = effect.request
            case EngineCancel():
                if self._queued.pop(effect.request, None) is None and not self._failed:
                    self._engine.cancel(effect.request)
            case EngineExport():
                yield from self._export(effect)
            case DropWeights() if not self._failed:
                for version in effect.versions:
                    self._engine.drop(version)
            case Sleep() if not self._failed:
                yield self._engine.sleep()

    def _export(self, effect: EngineExport) -> Iterator[EnginePortEvent]:
        if self._failed:
            yield EngineExported(request=effect.request, kv=None)
            return
        exported = self._engine.export(effect.request)
        if exported is None:
            return
        if exported.sampled is not None:
            yield exported.sampled
        yield EngineExported(request=effect.request, kv=exported.kv)

    def _fetch(self, effect: LoadWeights) -> Iterator[_Fetched]:
        yield _Fetched(effect=effect, path=self._weights_path(effect.digest))

    def _load(self, effect: LoadWeights) -> Iterator[EnginePortEvent]:
        load = self._engine.reload_keeping if effect.keep else self._engine.load
        try:
            loaded = load(self._file, version=effect.version, digest=effect.digest)
        except PolicyError:
            self._verify(effect.digest)
            self._file = self._weights_path(effect.digest)
            loaded = load(self._file, version=effect.version, digest=effect.digest)
        yield from loaded if isinstance(loaded, list) else [loaded]

    def _fail(self, effect: EngineEffect | None, error: Exception) -> Iterator[EnginePortEvent]:
        """Mark the engine as unusable. Raises InvariantBroken."""
        if isinstance(error, InvariantBroken):
            raise error
        self._failed = True
        self._queued.clear()
        if isinstance(effect, EngineExport):
            yield EngineExported(request=effect.request, kv=None)
        yield EngineFailed(message=reason(error))


def _not_loaded(effect: LoadWeights, error: Exception) -> list[LoadFailed]:
    """Raises InvariantBroken, which another worker would not avoid."""
    if isinstance(error, InvariantBroken):
        raise error
    # Known faults of a version or of the run occur on every worker.
    local = not isinstance(error, DoraError) or isinstance(error, ResourceError | BusError)
    hint = error.hint if isinstance(error, DoraError) else None
    return [LoadFailed(version=effect.version, message=reason(error), local=local, hint=hint)]
