"""The port of a generation engine.

An engine runs `slots` rows under one policy version, or several with `lora`; one thread calls
`step`. A token is a function of (logits, seed, position), never of the batch or earlier requests.
Declared capabilities, each covered by contract tests:

- ``counter_sampling``: equal logits, seed and position give the same token.
- ``batch_invariant``: a request's logits do not depend on other rows, bitwise.
- ``prefill_exact``: resuming by prefill gives the same bits.
- ``kv_export``: a request can resume elsewhere from its KV cache.
- ``lora``: versions are adapters on one base; a batch may mix them.
- ``partial_rollout``: weights can change under running requests, which are prefilled again.
- ``routes``: reports the routed experts of tokens.
- ``sleep``: releases its memory until the next load.
- ``prefix_reuse``: caches sequences and prompts by prefix, bitwise equal to a prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from dora_pipe.schemas.routes import Routes

COUNTER_SAMPLING = "counter_sampling"
BATCH_INVARIANT = "batch_invariant"
PREFILL_EXACT = "prefill_exact"
KV_EXPORT = "kv_export"
PARTIAL_ROLLOUT = "partial_rollout"
LORA = "lora"
PREFIX_REUSE = "prefix_reuse"
SLEEP = "sleep"
ROUTES = "routes"
UNASSIGNED_LEFT_OUT = "unassigned_left_out"
"""Capability to never sample ids without a token (`store.model_dir`)."""

Array = np.ndarray[Any, np.dtype[Any]]

StopReason = Literal["stop", "length", "error"]
"""Stop token or string; token limit or end of context; engine failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request, applied in order: temperature (0: greedy), top-k (0: all),
    top-p, min-p."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    """Ids that end the request; the stop token is part of the output."""
    stop: tuple[str, ...] = ()
    """Strings that end the request when the output contains one."""
    logprob_temperature: float = 1.0
    """Divisor of the logits for `logprobs`."""
    routes: bool = False
    """Report routed experts; requires the capability."""

    def ended_by(self, stop: tuple[str, ...], stop_ids: tuple[int, ...]) -> SamplingParams:
        """Return a copy with more stop conditions."""
        return replace(self, stop=(*self.stop, *stop), stop_ids=(*self.stop_ids, *stop_ids))

    @property
    def plain(self) -> bool:
        """Return whether `logprobs` are those of the sampling distribution."""
        full = self.top_k == 0 and self.top_p >= 1.0 and self.min_p == 0.0
        return full and self.temperature == self.logprob_temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class Kv:
    """KV cache of a sequence without its last token, which is the input of the next step."""

    tokens: int
    layout: str
    """Layout of the engine and model sizes; others are rejected."""
    weights: str
    """Digest (hex) of the weights that computed it."""
    array: Array = field(compare=False)
    """Little endian, row-major, not shared with the engine."""

    @property
    def bytes(self) -> int:
        return self.array.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request: `token_ids` are the prompt and the tokens sampled so far."""

    request: str
    token_ids: Sequence[int]
    sampled: int
    """Last `token_ids` that count against `max_tokens`; stop strings may begin in them."""
    seed: int
    params: SamplingParams
    emit_every: int = 0
    """Tokens between events; 0: one event at the end."""
    kv: Kv | None = None
    """Cache of all `token_ids` but the last; None: prefill."""
    version: int = -1
    """Resident version; -1: the version loaded last."""
    keep: bool = True
    """Let the prefix cache keep the whole sequence, not only the prompt."""
    routed: int = 0
    """Number of first tokens with known experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSampled:
    """Tokens since the last event; arrays of equal length.

    `logprobs` are of softmax(logits / `logprob_temperature`), `sampler_logprobs` of the sampling
    distribution (0.0 when greedy).
    """

    request: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    sampler_logprobs: Sequence[float]
    first_token_ns: int
    """Wall clock of this attempt's first token."""
    routes: Routes | None = None
    """Experts of these tokens; the first event of an attempt also covers tokens from
    `EngineRequest.routed` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request left its slot, after its last `TokensSampled`."""

    request: str
    reason: StopReason
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """Loaded weights with a verified digest; version -1 after `sleep`."""

    version: int
    digest: str
    load_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A request removed from its slot."""

    sampled: TokensSampled | None
    kv: Kv | None
    """Cache; None if the prompt was incomplete, or without `kv_export`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """Prompt tokens since the start, resumed sequences included; 0 if not counted."""

    computed: int = 0
    reused: int = 0


EngineEvent = TokensSampled | RequestFinished | WeightsLoaded


class Engine(Protocol):
    """A generation engine."""

    name: str
    version: str
    declares: frozenset[str]
    slots: int
    context_tokens: int
    device: str
    dtype: str
    max_resident_versions: int

    @property
    def kv_tokens(self) -> int:
        """Return the KV cache's capacity in tokens."""

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        """Replace the weights by a safetensors file; no row may be active.

        With `lora`, full weights are the base, and an adapter file adds a version while rows run.
        Raises ValueError if there is no room, PolicyError for another digest or model; the old
        weights remain.
        """

    def sleep(self) -> WeightsLoaded:
        """Release memory until the next `load`; requires `sleep`, no row may be active. Returns
        version -1."""

    def drop(self, version: int) -> None:
        """Drop a version that no row uses; an engine with one version keeps it."""

    def add(self, request: EngineRequest) -> None:
        """Add a request to a free slot. Raises ValueError if it does not fit, or if `kv_error`
        rejects its cache."""

    def kv_error(self, request: EngineRequest) -> str | None:
        """Return why the KV cache is rejected, or None."""

    def export(self, request: str) -> Exported | None:
        """Remove a request between two steps, without an event. Returns None for an unknown
        request, and for one that has ended on the server: the next steps emit its last tokens.

        With `kv_export`, another engine with the same weights resumes from `kv`: bitwise equal in
        the same batch, with `batch_invariant` in any.
        """

    def reload_keeping(self, weights: Path, *, version: int, digest: str) -> list[EngineEvent]:
        """Replace the weights under running requests; requires `partial_rollout`.

        Returns pending tokens of the old weights, then `WeightsLoaded`. Requests keep tokens, slots
        and limits, and are prefilled again as new requests with that prefix. Raises as `load`,
        without changes.
        """

    def cancel(self, request: str) -> None:
        """Drop a request without an event; ignores unknown ones."""

    def step(self) -> list[EngineEvent]:
        """Advance every active row by one token, prefilling new rows first.

        Bounded: rows with a long prompt or a late token get theirs in a later step. Events are in
        order of arrival.
        """

    @property
    def active(self) -> int:
        """Return the number of active rows."""

    @property
    def kv_used_tokens(self) -> int:
        """Return the tokens of active rows in the KV cache."""

    @property
    def prompt_tokens(self) -> PromptTokens:
        """Return prefilled and reused prompt tokens."""

    def close(self) -> None:
        """Release memory and device."""
