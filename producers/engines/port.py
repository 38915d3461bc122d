"""The port of a generation engine: rows of a running batch, sampled by counter; decides nothing.

An engine hosts one policy version at a time and has `slots` rows. It is driven from one thread by
`step`, which does a bounded amount of work. Sampling is a function of (logits, seed, position),
never of the batch or of what ran before.

What an engine can is declared, and the contract suite asks for exactly that:

- ``counter_sampling``: equal logits, seed and position give the equal token.
- ``batch_invariant``: the bits of a request's logits do not depend on the other rows.
- ``prefill_exact``: going on by prefill gives the same bits as never having stopped.
- ``kv_export``: a running request can be handed over with its KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

COUNTER_SAMPLING = "counter_sampling"
BATCH_INVARIANT = "batch_invariant"
PREFILL_EXACT = "prefill_exact"
KV_EXPORT = "kv_export"

StopReason = Literal["stop", "length", "error"]
"""A stop token or string; the token limit or the end of the context; the engine gave up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are drawn. `temperature` 0 is greedy; `top_k` 0 keeps all.

    Order: temperature, then top-k, then top-p, then min-p, each on what the last one left.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    """Token ids that end the request; the stop token itself is part of the output."""
    stop: tuple[str, ...] = ()
    """Strings that end the request as soon as the decoded output contains one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request to run: `token_ids` (prompt, and whatever was sampled before) are prefilled.

    Example: ``EngineRequest(request="g0000000042-003", token_ids=[1, 5, 7], sampled=0,
    seed=99, params=SamplingParams(max_tokens=8))``.
    """

    request: str
    token_ids: Sequence[int]
    sampled: int
    """How many of `token_ids`, at its end, count as already sampled against `max_tokens`. Stop
    strings may begin in these tokens."""
    seed: int
    params: SamplingParams
    emit_every: int = 0
    """Emit `TokensSampled` after every so many tokens; 0 only at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSampled:
    """Tokens of a running request since the last event of that request; arrays of equal length.

    `logprobs` are the model's own (temperature not applied), `sampler_logprobs` those of the
    distribution that was sampled from (0.0 when greedy).
    """

    request: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    sampler_logprobs: Sequence[float]
    first_token_ns: int
    """Wall clock of this request's first token in this stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request left its slot. Its last tokens came in a `TokensSampled` before this event."""

    request: str
    reason: StopReason
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """The engine hosts `version` now; the digest of the loaded bytes was checked."""

    version: int
    digest: str
    load_ms: float


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

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        """Replace the weights by those in a safetensors file; only while no row is active.

        Raises PolicyError when the bytes do not have this weights digest or do not fit the model;
        then the old weights stay.
        """
        ...

    def add(self, request: EngineRequest) -> None:
        """Take a request into a free slot. Raises ValueError when none is free or it cannot fit."""
        ...

    def cancel(self, request: str) -> None:
        """Drop a request without an event; unknown ones are ignored."""
        ...

    def step(self) -> list[EngineEvent]:
        """Advance every active row by one token (prefilling new rows first); [] when idle.

        A bounded amount of work: a row whose prompt is longer than an engine prefills in one step
        gets its first token in a later one. Events come in the order in which requests were added.
        """
        ...

    @property
    def active(self) -> int:
        """Rows in use."""
        ...

    @property
    def kv_used_tokens(self) -> int:
        """Tokens held in the KV cache by active rows."""
        ...

    def close(self) -> None:
        """Let go of memory and device."""
        ...
