"""Decides whether an engine can take a request; the same rule for every engine, without torch."""

from __future__ import annotations

from collections.abc import Container, Sized
from typing import Protocol

from dora_pipe.config.rollout_sections import TEMPERATURE_MAX, TEMPERATURE_MIN
from dora_pipe.producers.engines.port import EngineRequest, Kv, SamplingParams
from dora_pipe.producers.engines.stops import Decode, StopText


class Running(Container[str], Sized, Protocol):
    """The names of the requests in the engine's slots."""


def check_request(
    request: EngineRequest, *, running: Running, slots: int, context_tokens: int
) -> None:
    """Raise ValueError, in one line, for a request that cannot be taken into a free slot."""
    name, tokens = request.request, len(request.token_ids)
    if name in running:
        raise ValueError(f"{name}: is running already")
    if len(running) >= slots:
        raise ValueError(f"{name}: none of the {slots} slots is free")
    if tokens < 1:
        raise ValueError(f"{name}: has no tokens to go on from")
    if tokens >= context_tokens:
        raise ValueError(f"{name}: {tokens} tokens leave no room in a context of {context_tokens}")
    if not 0 <= request.sampled <= tokens:
        raise ValueError(f"{name}: {request.sampled} of {tokens} tokens cannot be sampled ones")
    if request.sampled >= request.params.max_tokens:
        raise ValueError(f"{name}: has its {request.params.max_tokens} tokens already")
    if request.emit_every < 0:
        raise ValueError(f"{name}: emit_every {request.emit_every} is negative")
    _check_params(name, request.params)


def kv_mismatch(request: EngineRequest, kv: Kv, *, layout: str, weights: str) -> str | None:
    """Why a KV cache does not belong under this request here; what the arrays are is
    `kv_array_mismatch`'s."""
    if kv.weights != weights:
        return "other weights"
    if kv.layout != layout:
        return "another layout"
    if kv.tokens != len(request.token_ids) - 1 or kv.tokens < 1:
        return "another number of tokens"
    return None


def kv_array_mismatch(kv: Kv, name: str, *, dtype: str, shape: tuple[int, ...]) -> str | None:
    """Why the one array of a KV cache is not such a one."""
    if set(kv.arrays) != {name}:
        return "other arrays"
    array = kv.arrays[name]
    if array.dtype.str != dtype:
        return "another type"
    return None if array.shape == shape else "another shape"


def stop_text(request: EngineRequest, decode: Decode | None) -> StopText | None:
    """What watches for the request's stop strings; None without any. Raises ValueError."""
    if not request.params.stop:
        return None
    if decode is None:
        raise ValueError(f"{request.request}: stop strings need an engine that can decode")
    sampled = request.token_ids[len(request.token_ids) - request.sampled :]
    return StopText(decode, request.params.stop, sampled)


def _check_params(name: str, params: SamplingParams) -> None:
    hot = params.temperature
    if hot and not TEMPERATURE_MIN <= hot <= TEMPERATURE_MAX:
        limits = f"0, or {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}"
        raise ValueError(f"{name}: temperature {hot} is not {limits}")
    if not TEMPERATURE_MIN <= params.logprob_temperature <= TEMPERATURE_MAX:
        raise ValueError(f"{name}: log-probs at temperature {params.logprob_temperature}")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"{name}: top_p {params.top_p} is not in (0, 1]")
    if params.top_k < 0:
        raise ValueError(f"{name}: top_k {params.top_k} is negative")
    if not 0 <= params.min_p <= 1:
        raise ValueError(f"{name}: min_p {params.min_p} is not in [0, 1]")
    if "" in params.stop:
        raise ValueError(f"{name}: an empty stop string would end every request at once")
