"""Worker's port to its engine. Threads fetch and load weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

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
    Handlers,
    attempt,
    run_effect,
)
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.engines.engine import (
    Engine,
    EngineRequest,
    RequestFinished,
    WeightsLoaded,
)
from dora_pipe.producers.worker.effects import (
    DropWeights,
    EngineAdd,
    EngineCancel,
    EngineEffect,
    EngineExport,
    EngineExported,
    EngineFailed,
    EngineStarted,
    LoadFailed,
    LoadWeights,
    Sleep,
)
from dora_pipe.schemas.policy import Fallback
from dora_pipe.store.copies import Fallbacks

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

    @property
    def fallbacks(self) -> Fallbacks:
        """Files found missing or damaged since the last call."""

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
        fallbacks: Callable[[], tuple[Fallback, ...]] = tuple,
        clock: Clock,
        in_thread: bool = True,
        steps_max: int = STEPS_MAX,
    ) -> None:
        self._engine = engine
        self._weights_path = weights_path
        self._verify = verify
        self._fallbacks = fallbacks
        self._clock = clock
        self._steps_max = steps_max
        self._events: list[Any] = []
        self._ahead: dict[str, EngineRequest] = {}
        self._later: list[EngineEffect] = []  # effects deferred while weights load
        self._gone = False
        self._handlers: Handlers = {
            EngineAdd: Handler(do=self._add, failed=self._failed),
            EngineCancel: Handler(do=self._cancel, failed=self._failed),
            EngineExport: Handler(do=self._export, failed=self._not_exported),
            DropWeights: Handler(do=self._drop, failed=self._failed),
            Sleep: Handler(do=self._sleep, failed=self._failed),
        }
        self._file = Path()  # current or last loaded
        fetching: Handlers = {LoadWeights: Handler(do=self._fetch, failed=_not_loaded)}
        self._fetching = EffectRunner("fetch-weights", fetching, in_thread=in_thread)
        loading: Handlers = {LoadWeights: Handler(do=self._load, failed=_not_loaded)}
        self._loading = EffectRunner("load-weights", loading, in_thread=in_thread)

    def start(self, effect: EngineEffect) -> None:
        if isinstance(effect, LoadWeights):
            under_way = self._fetching.working or self._loading.working
            assert not under_way, "weights are loaded one version at a time"
            self._fetching.start(effect)
            self._take_fetched()
        elif self._loading.working and not self._is_ahead(effect):
            self._later.append(effect)  # the thread owns the engine
        else:
            self._events += run_effect(self._handlers, effect)

    def poll(self) -> list[Any]:
        self._take_fetched()
        if self._loading.working:
            events, self._events = self._events, []
            return events
        self._events += self._loading.poll()
        later, self._later = self._later, []
        for effect in later:
            self._events += run_effect(self._handlers, effect)
        if not self._gone and (self._ahead or self._engine.active):
            self._events += attempt(
                "a step of the engine", self._steps, partial(self._failed, None)
            )
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        if self._events or self._fetching.busy or self._loading.busy:
            return True
        return not self._gone and (bool(self._ahead) or self._engine.active > 0)

    def close(self) -> None:
        """Wait up to `CLOSE_S` for weights; the creator of the engine closes it."""
        self._fetching.close(wait_s=CLOSE_S)
        self._loading.close(wait_s=CLOSE_S)

    def _take_fetched(self) -> None:
        for event in self._fetching.poll():
            if not isinstance(event, _Fetched):
                self._events.append(event)
            elif not self._gone:
                self._file = event.path
                self._loading.start(event.effect)

    def _is_ahead(self, effect: EngineEffect) -> bool:
        return isinstance(effect, EngineAdd) or (
            isinstance(effect, EngineCancel) and effect.request in self._ahead
        )

    def _steps(self) -> Iterator[Any]:
        until_ns = self._clock.now_ns() + STEP_NS
        for _ in range(self._steps_max):
            yield from self._refill()
            if not self._engine.active:
                break
            yield from self._engine.step()
            if self._clock.now_ns() >= until_ns:
                break

    def _refill(self) -> Iterator[Any]:
        while self._ahead and self._engine.active < self._engine.slots:
            name = next(iter(self._ahead))
            request, why = self._ahead.pop(name), None
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

    def _add(self, effect: EngineAdd) -> Iterator[Any]:
        self._ahead[effect.request.request] = effect.request
        yield from ()

    def _cancel(self, effect: EngineCancel) -> Iterator[Any]:
        if self._ahead.pop(effect.request, None) is None and not self._gone:
            self._engine.cancel(effect.request)
        yield from ()

    def _drop(self, effect: DropWeights) -> Iterator[Any]:
        for version in effect.versions:
            if not self._gone:
                self._engine.drop(version)
        yield from ()

    def _sleep(self, effect: Sleep) -> Iterator[Any]:
        if not self._gone:
            yield self._engine.sleep()

    def _export(self, effect: EngineExport) -> Iterator[Any]:
        if self._gone:
            yield EngineExported(request=effect.request, kv=None)
            return
        exported = self._engine.export(effect.request)
        if exported is None:
            return
        if exported.sampled is not None:
            yield exported.sampled
        yield EngineExported(request=effect.request, kv=exported.kv)

    def _fetch(self, effect: LoadWeights) -> Iterator[Any]:
        yield _Fetched(effect=effect, path=self._weights_path(effect.digest))

    def _load(self, effect: LoadWeights) -> Iterator[Any]:
        load = self._engine.reload_keeping if effect.keep else self._engine.load
        try:
            loaded = load(self._file, version=effect.version, digest=effect.digest)
        except PolicyError:
            self._verify(effect.digest)
            self._file = self._weights_path(effect.digest)
            loaded = load(self._file, version=effect.version, digest=effect.digest)
        for event in loaded if isinstance(loaded, list) else [loaded]:
            if isinstance(event, WeightsLoaded):
                yield replace(event, fallbacks=self._fallbacks())
            else:
                yield event

    def _failed(self, effect: Any, error: Exception) -> list[Any]:
        """Mark the engine as unusable. Raises InvariantBroken."""
        if isinstance(error, InvariantBroken):
            raise error
        self._gone = True
        self._ahead.clear()
        return [EngineFailed(message=reason(error))]

    def _not_exported(self, effect: EngineExport, error: Exception) -> list[Any]:
        return [EngineExported(request=effect.request, kv=None), *self._failed(effect, error)]


def _not_loaded(effect: LoadWeights, error: Exception) -> list[LoadFailed]:
    """Raises InvariantBroken, which another worker would not avoid."""
    if isinstance(error, InvariantBroken):
        raise error
    # Known faults of a version or of the run occur on every worker.
    here = not isinstance(error, DoraError) or isinstance(error, ResourceError | BusError)
    hint = error.hint if isinstance(error, DoraError) else None
    return [LoadFailed(version=effect.version, message=reason(error), here=here, hint=hint)]
