"""vLLM's `POST /inference/v1/generate`: token ids in and out."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dora_pipe.producers.sessions.calls import (
    STOPS_MAX,
    CallRequest,
    Choices,
    Limit,
    Refused,
    Sampled,
    Stop,
    Stops,
    caller_of,
    decoded,
    stops_of,
)


class SamplingParams(msgspec.Struct, kw_only=True):
    """Supported `sampling_params`; stops add to the run's."""

    max_tokens: Limit | None = None
    n: Choices | None = None
    logprobs: int | None = None
    stop: Stop | Stops | None = None
    stop_token_ids: list[int] | None = None


class GenerateRequest(msgspec.Struct, kw_only=True):
    """Supported keys of a body."""

    token_ids: Annotated[list[int], Meta(min_length=1)]
    sampling_params: dict[str, Any] = {}
    model: str = ""
    request_id: str = ""


def read(
    body: bytes, *, vocabulary: int, stop_ids: frozenset[int], caller: str = ""
) -> tuple[GenerateRequest, CallRequest]:
    """Parse a request. Raises Refused."""
    request, unread = decoded(body, GenerateRequest)
    params, settings = decoded(request.sampling_params, SamplingParams)
    ids = request.token_ids
    if not 0 <= min(ids) <= max(ids) < vocabulary:
        raise Refused(400, "invalid_request", f"token_ids: not all are below {vocabulary}")
    extra = sorted(set(params.stop_token_ids or ()) - stop_ids)
    if len(extra) > STOPS_MAX or (extra and not 0 <= extra[0] <= extra[-1] < vocabulary):
        message = f"stop_token_ids: more than {STOPS_MAX}, or not all below {vocabulary}"
        raise Refused(400, "invalid_request", message)
    call_request = CallRequest(
        api="generate",
        token_ids=tuple(ids),
        max_tokens=params.max_tokens,
        choices=params.n or 1,
        stop=stops_of(params.stop),
        stop_ids=tuple(extra),
        settings={**unread, **settings},
        caller=caller_of(caller),
    )
    return request, call_request


def answer(request: GenerateRequest, choices: list[Sampled], *, answer_id: str) -> dict[str, Any]:
    """Return the choices; log-probs name tokens by id."""
    with_logprobs = request.sampling_params.get("logprobs") is not None
    return {
        "request_id": request.request_id or answer_id,
        "prompt_token_ids": request.token_ids,
        "choices": [
            {
                "index": index,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish if choice.finish in ("stop", "length") else "stop",
                "logprobs": _logprobs(choice) if with_logprobs else None,
            }
            for index, choice in enumerate(choices)
        ],
    }


def _logprobs(sampled: Sampled) -> dict[str, Any]:
    pairs = zip(sampled.token_ids, sampled.logprobs, strict=True)
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token_id}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token_id, value in pairs
    ]
    return {"content": content}
