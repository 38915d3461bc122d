"""The port of a generation engine: rows of a running batch, sampled by counter; decides nothing.

An engine hosts one policy version at a time, or with `lora` several, and has `slots` rows. It is
driven from one thread by `step`, which does a bounded amount of work. Sampling is a function of
(logits, seed, position), never of the batch or of what ran before.

What an engine can is declared, and the contract suite asks for exactly that:

- ``counter_sampling``: equal logits, seed and position give the equal token.
- ``batch_invariant``: the bits of a request's logits do not depend on the other rows.
- ``prefill_exact``: going on by prefill gives the same bits as never having stopped.
- ``kv_export``: a running request can be taken out with its KV cache, and goes on elsewhere from
  just these numbers: with ``batch_invariant`` with the bits it would have had, without it with
  those of a step in the company that it comes to.
- ``lora``: versions are adapters on one base, of which `versions_resident` live beside each other:
  each row of a batch under its own.
- ``interruptible``: weights can change under running requests, which are then prefilled again.
- ``routes``: of a mixture, it says through which experts every token went; where going on by
  prefill gives the same bits, these are the same too.
- ``sleep``: it lets go of its weights, and of the memory for KV caches, until the next load.
- ``prefix_reuse``: keys and values of sequences are kept when these have left their slot, and of
  prompts for other requests; who begins with the same tokens under the same weights goes on from
  them, with the very bits of a prefill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from dora_pipe.schemas.policy import Fallback
from dora_pipe.schemas.routes import Routes

COUNTER_SAMPLING = "counter_sampling"
BATCH_INVARIANT = "batch_invariant"
PREFILL_EXACT = "prefill_exact"
KV_EXPORT = "kv_export"
INTERRUPTIBLE = "interruptible"
LORA = "lora"
PREFIX_REUSE = "prefix_reuse"
SLEEP = "sleep"
ROUTES = "routes"
UNASSIGNED_LEFT_OUT = "unassigned_left_out"
"""It never samples token ids without a token (`store.vocabulary`), where a model has some."""

Array = np.ndarray[Any, np.dtype[Any]]

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
    logprob_temperature: float = 1.0
    """What logits are divided by before `logprobs` are taken of them."""
    routes: bool = False
    """Whether its events say through which experts tokens went; only with `routes` declared."""

    def ended_by(self, stop: tuple[str, ...], stop_ids: tuple[int, ...]) -> SamplingParams:
        """The same with more that ends a request."""
        return replace(self, stop=(*self.stop, *stop), stop_ids=(*self.stop_ids, *stop_ids))

    @property
    def plain(self) -> bool:
        """Whether tokens are drawn from the distribution that `logprobs` are of."""
        whole = self.top_k == 0 and self.top_p >= 1.0 and self.min_p == 0.0
        return whole and self.temperature == self.logprob_temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class Kv:
    """The KV cache of one request: of its whole sequence but the last token.

    The last token's keys do not exist yet: it is the input of the next step. So a sequence of n
    tokens goes on from a cache of n - 1 positions, as it does inside an engine.
    """

    tokens: int
    """Positions [0, tokens) of the sequence."""
    layout: str
    """Which engine's arrangement of which model's sizes this is; only an equal one is taken."""
    weights: str
    """Digest (hex) of the weights that made it."""
    arrays: Mapping[str, Array] = field(compare=False)
    """By name; little endian, row-major. They share no memory with the engine's cache."""

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())


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
    kv: Kv | None = None
    """The KV cache of all `token_ids` but the last; None: they are prefilled."""
    version: int = -1
    """Which of the resident versions samples it, where there are several; -1: the one that was
    loaded last."""
    keep: bool = True
    """Whether a later request may go on from its end: an engine with `prefix_reuse` keeps what it
    has computed of the whole, else of the prompt alone."""
    routed: int = 0
    """Of how many first tokens the experts are known (`TokensSampled.routes`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensSampled:
    """Tokens of a running request since the last event of that request; arrays of equal length.

    `logprobs` are of softmax(logits / `logprob_temperature`), `sampler_logprobs` those of the
    distribution that was sampled from: of softmax(logits / temperature) what top-k, top-p and min-p
    leave (0.0 when greedy).
    """

    request: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    sampler_logprobs: Sequence[float]
    first_token_ns: int
    """Wall clock of this request's first token in this stay."""
    routes: Routes | None = None
    """Where `SamplingParams.routes` asks for it: of these tokens, and in the first event of a stay
    of those before them from `EngineRequest.routed` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFinished:
    """A request left its slot. Its last tokens came in a `TokensSampled` before this event."""

    request: str
    reason: StopReason
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    """The engine hosts `version` now; the digest of the loaded bytes was checked. -1: it sleeps."""

    version: int
    digest: str
    load_ms: float
    fallbacks: tuple[Fallback, ...] = ()
    """What was lost or damaged on the way to its file; the worker's port knows, not the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A request that was taken out of its slot."""

    sampled: TokensSampled | None
    """What was sampled and not yet emitted."""
    kv: Kv | None
    """None while its prompt was not complete in the cache, or for want of `kv_export`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """What an engine has done with the tokens of prompts since it opened; a sequence that goes on
    is a prompt, too. What an engine does not count is 0."""

    computed: int = 0
    reused: int = 0
    """Taken from what was kept of equal beginnings."""


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
    versions_resident: int
    """Policy versions that it can host at the same time."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV cache has room for."""

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        """Replace the weights by those in a safetensors file; only while no row is active.

        With `lora`, whole weights are the base, and an adapter's file (`policies.adapters`) makes a
        version resident beside those that are, whatever runs; ValueError when there is no room.
        Raises PolicyError when the bytes do not have this weights digest or do not fit the model;
        then the old weights stay.
        """

    def sleep(self) -> WeightsLoaded:
        """Let go of weights and of the memory for KV caches, until the next `load`; only with
        `sleep`, and only while no row is active. Answers with version -1."""

    def drop(self, version: int) -> None:
        """Forget a resident version; no row runs under it. An engine with one version keeps it."""

    def add(self, request: EngineRequest) -> None:
        """Take a request into a free slot. Raises ValueError when none is free or it cannot fit.

        A request with a KV cache goes on from that; one that cannot be taken is a ValueError too,
        ask `kv_error` before.
        """

    def kv_error(self, request: EngineRequest) -> str | None:
        """Why the KV cache of a request cannot be taken; None if it can, or there is none."""

    def export(self, request: str) -> Exported | None:
        """Take a request out, between two steps; None for an unknown one, and for one that has
        ended where it is computed though no step has given its last tokens: the next ones do.

        No event follows: what it had sampled is in the answer. With `kv_export`, another engine of
        the same weights that gets the sequence and `kv` goes on from it: in the same company with
        the very same bits, and with `batch_invariant` in any.
        """

    def reload_keeping(self, weights: Path, *, version: int, digest: str) -> list[EngineEvent]:
        """Replace the weights under running requests; only with `interruptible`.

        Answers with the tokens that were sampled under the old weights and not yet emitted, then
        `WeightsLoaded`. Every running request keeps its tokens, its slot and its limits; the next
        step prefills its whole sequence again and goes on as a fresh request with that prefix would
        under the new weights. Raises as `load` does; then nothing has changed.
        """

    def cancel(self, request: str) -> None:
        """Drop a request without an event; unknown ones are ignored."""

    def step(self) -> list[EngineEvent]:
        """Advance every active row by one token (prefilling new rows first); [] when idle.

        A bounded amount of work, and a bounded wait: a row whose prompt is longer than an engine
        prefills in one step gets its first token in a later one, and so does a row whose token is
        computed elsewhere and has not come in time; a step may give no token at all. Events come in
        the order in which requests were added.
        """

    @property
    def active(self) -> int:
        """Rows in use."""

    @property
    def kv_used_tokens(self) -> int:
        """Tokens held in the KV cache by active rows."""

    @property
    def prompt_tokens(self) -> PromptTokens:
        """How many were prefilled, and how many need not be."""

    def close(self) -> None:
        """Let go of memory and device."""
