"""The worker's port to its engine; it decides when rows are advanced, and when weights change.

Weights are fetched, and loaded, in threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

from dora_pipe.core.clock import Clock
from dora_pipe.core.effect_runner import (
    EffectRunner,
    Handler,
    Handlers,
    attempt,
    run_effect,
)
from dora_pipe.core.errors import (
    BusError,
    DoraError,
    InvariantBroken,
    PolicyError,
    ResourceError,
    reason,
)
from dora_pipe.producers.engines.port import (
    Engine,
    EngineRequest,
    RequestFinished,
    WeightsLoaded,
)
from dora_pipe.producers.worker.effects import (
    DropWeights,
    EngineAdd,
    EngineCancel,
    EngineExport,
    EngineExported,
    EngineFailed,
    EngineStarted,
    LoadFailed,
    LoadWeights,
    Sleep,
)
from dora_pipe.schemas.policy import Fallback
from dora_pipe.store.fallbacks import Fallbacks

STEP_NS: Final = 10_000_000
"""The engine steps until so much time has passed, so that a turn of the loop costs little beside
it; no slot waits for that, the port has requests ahead."""

STEPS_MAX: Final = 64
"""Steps in one poll, also where no time passes."""

CLOSE_S: Final = 30.0
"""Closing waits so long for weights that are being loaded."""


class Policies(Protocol):
    """What a worker needs of the run's store: `store.store.PolicyStore`."""

    def weights(self, digest: str) -> Path:
        """The file of a version's weights."""

    def verify(self, digest: str) -> object:
        """Raises PolicyError where that file is not what its digest says."""

    @property
    def fallbacks(self) -> Fallbacks:
        """What was lost or damaged there since it was asked last."""

    def assets(self, digest: str) -> Path:
        """The directory of the model's config and tokenizer files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetched:
    """Weights that are here, to be loaded."""

    effect: LoadWeights
    path: Path


class EnginePort:
    """Drives an engine, and refills its slots between two steps from the requests it was handed.

    With `in_thread`, weights are had and loaded beside the loop: rows go on under those there are
    until the file of the next ones is here, be it fetched or made of patches. An engine that fails
    in the loop is not touched any more: its worker hears `EngineFailed` and leaves.

    A file that the engine refuses may have been damaged since it was had: `verify` reads it, takes
    a damaged copy away or raises PolicyError, and then it is had and loaded again, once.
    `fallbacks` tells which files of versions were lost or damaged meanwhile.
    """

    effects: tuple[type, ...] = (
        *(EngineAdd, EngineCancel, EngineExport, DropWeights, Sleep, LoadWeights),
    )

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
        self._later: list[Any] = []  # weights are being loaded
        self._gone = False
        self._handlers: Handlers = {
            EngineAdd: Handler(do=self._add, failed=self._failed),
            EngineCancel: Handler(do=self._cancel, failed=self._failed),
            EngineExport: Handler(do=self._export, failed=self._not_exported),
            DropWeights: Handler(do=self._drop, failed=self._failed),
            Sleep: Handler(do=self._sleep, failed=self._failed),
        }
        self._file = Path()  # what is loaded, or was last
        fetching: Handlers = {LoadWeights: Handler(do=self._fetch, failed=_not_loaded)}
        self._fetching = EffectRunner("fetch-weights", fetching, in_thread=in_thread)
        loading: Handlers = {LoadWeights: Handler(do=self._load, failed=_not_loaded)}
        self._loading = EffectRunner("load-weights", loading, in_thread=in_thread)

    def start(
        self, effect: EngineAdd | EngineCancel | EngineExport | DropWeights | Sleep | LoadWeights
    ) -> None:
        if isinstance(effect, LoadWeights):
            under_way = self._fetching.working or self._loading.working
            assert not under_way, "weights are loaded one version at a time"
            self._fetching.start(effect)
            self._take_fetched()
        elif self._loading.working and not self._is_ahead(effect):
            self._later.append(effect)  # the thread has the engine
        else:
            self._events += run_effect(self._handlers, effect)

    def poll(self) -> list[Any]:
        """Steps for the budget; or whether loading has come to an end."""
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
        """Whether there are tokens to sample."""
        if self._events or self._fetching.busy or self._loading.busy:
            return True
        return not self._gone and (bool(self._ahead) or self._engine.active > 0)

    def close(self) -> None:
        """Wait a while for weights under way. Who made the engine closes it."""
        self._fetching.close(wait_s=CLOSE_S)
        self._loading.close(wait_s=CLOSE_S)

    def _take_fetched(self) -> None:
        """Load what has been fetched; from then on the thread has the engine."""
        for event in self._fetching.poll():
            if not isinstance(event, _Fetched):
                self._events.append(event)
            elif not self._gone:
                self._file = event.path
                self._loading.start(event.effect)

    def _is_ahead(self, effect: Any) -> bool:
        """Whether it concerns no slot: a request to come, or one that has none yet."""
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
        """Fill free slots in order. A request that the engine refuses has ended with an error."""
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
        """Take a request out. One that has ended tells of that itself."""
        if self._gone:
            yield EngineExported(request=effect.request, kv=None)
            return
        found = self._engine.export(effect.request)
        if found is None:
            return
        if found.sampled is not None:
            yield found.sampled
        yield EngineExported(request=effect.request, kv=found.kv)

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
        for one in loaded if isinstance(loaded, list) else [loaded]:
            if isinstance(one, WeightsLoaded):
                yield replace(one, fallbacks=self._fallbacks())
            else:
                yield one

    def _failed(self, effect: Any, error: Exception) -> list[Any]:
        """The engine is in no state that anybody knows. Raises InvariantBroken."""
        if isinstance(error, InvariantBroken):
            raise error
        self._gone = True
        self._ahead.clear()
        return [EngineFailed(message=reason(error))]

    def _not_exported(self, effect: EngineExport, error: Exception) -> list[Any]:
        return [EngineExported(request=effect.request, kv=None), *self._failed(effect, error)]


def _not_loaded(effect: LoadWeights, error: Exception) -> list[LoadFailed]:
    """Raises InvariantBroken: no other worker would help."""
    if isinstance(error, InvariantBroken):
        raise error
    # What is known to be wrong with a version, or with the run, is wrong everywhere.
    here = not isinstance(error, DoraError) or isinstance(error, ResourceError | BusError)
    hint = error.hint if isinstance(error, DoraError) else None
    return [LoadFailed(version=effect.version, message=reason(error), here=here, hint=hint)]
