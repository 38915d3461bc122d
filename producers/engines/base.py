"""Base classes that the engines share.

An engine has one policy version, or several resident adapters on one base.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dora_pipe.core.errors import PolicyError
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.producers.engines.engine import (
    ROUTES,
    EngineEvent,
    EngineRequest,
    Exported,
    Kv,
    PromptTokens,
    TokensSampled,
    WeightsLoaded,
)
from dora_pipe.producers.engines.requests import Decode, RunningRequest, check_request, kv_mismatch
from dora_pipe.schemas.rounds import NO_VERSION
from dora_pipe.store.adapters import base_of
from dora_pipe.store.model_dir import CONFIG, positions_of, read_config


def need_positions(model_dir: Path, context_tokens: int) -> None:
    """Raise PolicyError if the model has fewer positions than a context."""
    longest = positions_of(read_config(model_dir))
    if longest is not None and longest < context_tokens:
        raise PolicyError(
            f"{model_dir / CONFIG}: its {longest} positions are fewer than workers.max_model_len"
            f" = {context_tokens}",
            hint=f"workers.max_model_len = {longest} or less",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    digest: str


V = TypeVar("V", bound=Version)
R = TypeVar("R", bound=RunningRequest)


class ResidentVersions(Generic[V]):
    """Policy versions of an engine: one, or with `adapters` several on one base."""

    def __init__(self, kind: type[V], *, most: int, adapters: bool, base: str = "") -> None:
        self.most = most
        self.adapters = adapters
        self.base = base
        """Weights digest of the base, or of the one version; empty without weights."""
        self._kind = kind
        self._latest = -1
        self._versions: dict[int, V] = {}

    def is_whole(self, weights: Path, digest: str) -> bool:
        """Return whether a file replaces all weights; else it adds a version."""
        return not self.adapters or (base_of(weights) is None and digest != self.base)

    def replaces(self, version: int, digest: str) -> bool:
        """Return whether rows may use a version that a load removes."""
        held = self._versions.get(version)
        return self.most == 1 or (held is not None and held.digest != digest)

    def settle(self, path: Path, *, version: int, digest: str) -> None:
        """Register new weights as the only version."""
        for held in list(self._versions):
            self.drop(held)
        self.base = digest
        if self.adapters:
            self.add(path, version=version, digest=digest)

    def add(self, path: Path, *, version: int, digest: str) -> None:
        """Make an adapter or the base resident. Raises PolicyError for another base or model,
        ValueError if full."""
        held = self._versions.get(version)
        if held is None and len(self._versions) >= self.most > 1:
            raise ValueError(f"{self.most} versions are resident; drop one first")
        if held is None or held.digest != digest:
            resident = self._made(path, version, digest)
            for other in list(self._versions) if self.most == 1 else [version]:
                self.drop(other)
            self._versions[version] = resident
        self._latest = version

    def forget(self) -> None:
        for held in list(self._versions):
            self.drop(held)
        self.base = ""

    @property
    def digests(self) -> set[str]:
        return (
            {version.digest for version in self._versions.values()}
            if self.adapters
            else {self.base}
        )

    def drop(self, version: int) -> None:
        self._versions.pop(version, None)

    def knows(self, request: EngineRequest) -> bool:
        return not self.adapters or self.number_of(request) in self._versions

    def of(self, request: EngineRequest) -> V:
        """Return the request's version. Raises ValueError if not resident."""
        number = self.number_of(request)
        if not self.knows(request):
            raise ValueError(f"{request.request}: version {number} is not resident")
        return self._versions[number] if self.adapters else self._kind(digest=self.base)

    def number_of(self, request: EngineRequest) -> int:
        if not self.adapters:
            return -1
        return self._latest if request.version < 0 else request.version

    def _made(self, path: Path, version: int, digest: str) -> V:
        raise NotImplementedError


class EngineBase(Generic[R]):
    """Shared parts of the engines; R is the type of a row."""

    name = ""
    declares: frozenset[str]
    _layout = ""
    """Layout of KV caches; empty without export."""
    _vocabulary: int | None = None
    _versions: ResidentVersions[Any]

    def __init__(
        self,
        *,
        slots: int,
        context_tokens: int,
        versions: ResidentVersions[Any],
        decode: Decode | None,
        clock: Clock | None,
    ) -> None:
        self.slots, self.context_tokens = slots, context_tokens
        self.max_resident_versions = versions.most
        self._versions = versions
        self._decode = decode
        self._clock = clock or SystemClock()
        self._rows: dict[str, R] = {}
        """Rows by request, in order of arrival."""
        self._computed = self._reused = 0

    @property
    def prompt_tokens(self) -> PromptTokens:
        return PromptTokens(computed=self._computed, reused=self._reused)

    @property
    def kv_tokens(self) -> int:
        return self.slots * self.context_tokens

    @property
    def active(self) -> int:
        return len(self._rows)

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        full = self._versions.is_whole(weights, digest)
        if self._rows and (full or self._versions.replaces(version, digest)):
            raise ValueError(f"{self.active} rows are active; weights change without requests")
        started_ns = self._clock.now_ns()
        if full:
            held = self._read(weights, version, digest)
            return self._replaced(held, weights, version, digest, started_ns)
        self._versions.add(weights, version=version, digest=digest)
        return self._loaded(version, digest, started_ns)

    def sleep(self) -> WeightsLoaded:
        if self._rows:
            raise ValueError(f"{self.active} rows are active; an engine sleeps between requests")
        started_ns = self._clock.now_ns()
        self._release_memory()
        self._versions.forget()
        return self._loaded(NO_VERSION, "", started_ns)

    def drop(self, version: int) -> None:
        self._versions.drop(version)
        self._versions_changed()

    def reload_keeping(self, weights: Path, *, version: int, digest: str) -> list[EngineEvent]:
        if self._versions.adapters:
            raise ValueError("a LoRA policy keeps several versions resident")
        started_ns = self._clock.now_ns()
        held = self._read(weights, version, digest)
        pending = [self._emit(row) for row in self._rows.values()]
        for row in self._rows.values():
            self._interrupt(row)
        loaded = self._replaced(held, weights, version, digest, started_ns)
        for row in self._rows.values():
            self._resume(row)
        return [*(event for event in pending if event is not None), loaded]

    def kv_error(self, request: EngineRequest) -> str | None:
        kv = request.kv
        if kv is None or not self._versions.knows(request):
            return None
        if request.params.routes and request.routed <= kv.tokens:
            return "tokens without recorded experts"
        dtype, shape = self._kv_array(kv.tokens)
        return kv_mismatch(
            request,
            kv,
            layout=self._layout,
            weights=self._versions.of(request).digest,
            dtype=dtype,
            shape=shape,
        )

    def export(self, request: str) -> Exported | None:
        row = self._rows.get(request)
        if row is None:
            return None
        exported = Exported(sampled=self._emit(row), kv=self._kv_of(row))
        self._release(row)
        return exported

    def cancel(self, request: str) -> None:
        row = self._rows.get(request)
        if row is not None:
            self._release(row)

    def close(self) -> None:
        for request in list(self._rows):
            self.cancel(request)

    def _check(self, request: EngineRequest) -> None:
        check_request(
            request, running=self._rows, slots=self.slots, context_tokens=self.context_tokens
        )
        if not self._has_weights():
            raise ValueError(f"{request.request}: no weights are loaded")
        low, high = min(request.token_ids), max(request.token_ids)
        if self._vocabulary is not None and not 0 <= low <= high < self._vocabulary:
            raise ValueError(
                f"{request.request}: token ids beyond a vocabulary of {self._vocabulary}"
            )
        if request.params.routes and ROUTES not in self.declares:
            raise ValueError(f"{request.request}: engine {self.name} does not report experts")
        self._versions.of(request)
        misfit = self.kv_error(request)
        if misfit is not None:
            raise ValueError(f"{request.request}: its KV cache is of {misfit}")

    def _replaced(
        self, held: Any, weights: Path, version: int, digest: str, started_ns: int
    ) -> WeightsLoaded:
        self._replace(held, version, digest)
        self._versions.settle(weights, version=version, digest=digest)
        return self._loaded(version, digest, started_ns)

    def _loaded(self, version: int, digest: str, started_ns: int) -> WeightsLoaded:
        self._versions_changed()
        load_ms = (self._clock.now_ns() - started_ns) / 1e6
        return WeightsLoaded(version=version, digest=digest, load_ms=load_ms)

    # Hooks of the engines

    def step(self) -> list[EngineEvent]:
        raise NotImplementedError

    def _has_weights(self) -> bool:
        return True

    def _read(self, weights: Path, version: int, digest: str) -> Any:
        """Return the argument of `_replace`. Raises PolicyError for another digest or model."""
        raise NotImplementedError

    def _replace(self, held: Any, version: int, digest: str) -> None:
        raise NotImplementedError

    def _release_memory(self) -> None:
        """Release weights and KV caches; no row is active."""
        raise ValueError(f"engine {self.name} cannot sleep")

    def _versions_changed(self) -> None:
        """Handle changed versions."""

    def _interrupt(self, row: R) -> None:
        """Prepare a row for a weight change."""

    def _resume(self, row: R) -> None:
        """Resume a row after a weight change."""

    def _emit(self, row: R) -> TokensSampled | None:
        return row.emit()

    def _release(self, row: R) -> None:
        """Free the row's slot, in any state."""
        del self._rows[row.request.request]

    def _kv_of(self, row: R) -> Kv | None:
        return None

    def _kv_array(self, tokens: int) -> tuple[str, tuple[int, ...]]:
        """Return type and shape of the array."""
        raise NotImplementedError
