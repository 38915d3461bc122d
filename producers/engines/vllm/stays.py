"""What both vLLM engines decide alike: which requests and versions they take, and what is left.

One runs vLLM in this process, the other asks a server. A request is a row here, and its time in
vLLM is a stay; how a stay begins and ends is theirs (`_give`, `_let_go`), and how weights are
replaced (`_replace`). With `lora` versions are adapters on one base, several of them resident, and
a request runs under the adapter of its version. It imports no vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dora_pipe.core.clock import Clock, SystemClock
from dora_pipe.producers.engines.port import (
    COUNTER_SAMPLING,
    INTERRUPTIBLE,
    LORA,
    EngineEvent,
    EngineRequest,
    Exported,
    Kv,
    SamplingParams,
    WeightsLoaded,
)
from dora_pipe.producers.engines.requests import check_request, stop_text
from dora_pipe.producers.engines.stops import Decode
from dora_pipe.producers.engines.vllm.lora import Residents
from dora_pipe.producers.engines.vllm.rows import MIN_P_AND_TOP_P, Row


class Stays:
    """The part of the engine port that does not depend on where vLLM runs."""

    declares = frozenset({COUNTER_SAMPLING, INTERRUPTIBLE})

    def __init__(
        self,
        *,
        slots: int,
        context_tokens: int,
        vocabulary: int,
        decode: Decode | None,
        clock: Clock | None,
        residents: Residents,
    ) -> None:
        self.slots, self.context_tokens = slots, context_tokens
        self.versions_resident = residents.most
        if residents.adapters:
            self.declares = frozenset({COUNTER_SAMPLING, LORA})
        self._residents = residents
        self._vocabulary = vocabulary
        self._decode = decode
        self._clock = clock or SystemClock()
        self._rows: dict[str, Row] = {}
        self._stays = 0
        self._label = ""
        """vLLM's name of the weights that are loaded; empty before, and while they change."""

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        """See the port."""
        whole = self._residents.is_whole(weights, digest)
        if whole or self._residents.replaces(version, digest):
            self._check_idle()
        if whole:
            return self._replace(weights, version, digest)
        started_ns = self._clock.now_ns()
        self._residents.take(weights, version=version, digest=digest)
        load_ms = (self._clock.now_ns() - started_ns) / 1e6
        return WeightsLoaded(version=version, digest=digest, load_ms=load_ms)

    def drop(self, version: int) -> None:
        """See the port."""
        self._residents.drop(version)

    def add(self, request: EngineRequest) -> None:
        """See the port."""
        self._residents.of(request)
        check_request(
            request, running=self._rows, slots=self.slots, context_tokens=self.context_tokens
        )
        if not self._label:
            raise ValueError(f"{request.request}: no weights are loaded")
        if not 0 <= min(request.token_ids) <= max(request.token_ids) < self._vocabulary:
            raise ValueError(
                f"{request.request}: token ids beyond a vocabulary of {self._vocabulary}"
            )
        if request.params.min_p and request.params.top_p < 1:
            raise ValueError(f"{request.request}: {MIN_P_AND_TOP_P}")
        misfit = self.kv_error(request)
        if misfit is not None:
            raise ValueError(f"{request.request}: its KV cache is of {misfit}")
        row = Row(
            request=replace(request, kv=None),
            stops=stop_text(request, self._decode),
            arrival=self._stays,
            kv=request.kv,
        )
        self._give(row)
        self._rows[request.request] = row

    def kv_error(self, request: EngineRequest) -> str | None:
        """See the port; an engine that does not declare `kv_export` takes none."""
        return None if request.kv is None else "another layout"

    def export(self, request: str) -> Exported | None:
        """See the port."""
        row = self._rows.get(request)
        if row is None:
            return None
        kv = self._kv_of(row)
        self._let_go(row)
        return Exported(sampled=row.emit() if row.pending else None, kv=kv)

    def cancel(self, request: str) -> None:
        """See the port."""
        row = self._rows.get(request)
        if row is not None:
            self._let_go(row)

    def step(self) -> list[EngineEvent]:
        """See the port."""
        raise NotImplementedError

    @property
    def active(self) -> int:
        """See the port."""
        return len(self._rows)

    @property
    def kv_used_tokens(self) -> int:
        """See the port; prompts that vLLM shares between requests count for each, and what a server
        is ahead of the steps does not count."""
        return sum(row.cached for row in self._rows.values())

    def _replace(self, weights: Path, version: int, digest: str) -> WeightsLoaded:
        """Replace the weights by those in a file; nothing runs."""
        raise NotImplementedError

    def _give(self, row: Row) -> None:
        """Begin a stay in vLLM."""
        raise NotImplementedError

    def _kv_of(self, row: Row) -> Kv | None:
        """A copy of a row's KV cache; None from an engine that cannot have it."""
        return None

    def _let_go(self, row: Row) -> None:
        """End a row and its stay, wherever it stands."""
        raise NotImplementedError

    def _check_idle(self) -> None:
        """Weights change between requests."""
        if self._rows:
            raise ValueError(f"{self.active} rows are active; weights change between requests")

    def _check_interruptible(self) -> None:
        """Weights change under running requests only where there is one version of them."""
        if self._residents.adapters:
            raise ValueError("versions of a LoRA policy live beside each other")

    def _pending(self) -> list[EngineEvent]:
        """What all rows hold back."""
        return [row.emit() for row in self._rows.values() if row.pending]

    def _tokens_left(self, row: Row) -> int:
        """How many tokens the row may still sample."""
        left = row.request.params.max_tokens - row.request.sampled - len(row.tokens)
        return min(left, self.context_tokens - len(row.sequence))

    def _warm_up(self, label: str) -> None:
        """Sample with the random weights of this label: vLLM's first steps take seconds, which here
        nobody waits for, while a worker that has joined would be silent for longer than its lease.
        """
        if self.context_tokens == 1:
            return
        self._label = label
        warm = SamplingParams(max_tokens=2, temperature=0.7)
        with self._residents.without():
            self.add(EngineRequest(request="warm", token_ids=[0], sampled=0, seed=0, params=warm))
            while self._rows:
                self.step()
        self._label = ""
