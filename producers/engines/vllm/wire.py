"""Records and request bodies of a vLLM server's HTTP interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.schemas.routes import Routes

QUOTED_CHARACTERS_MAX: Final = 300

GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/abort_requests"
RPC: Final = "/collective_rpc"
HEALTH: Final = "/health"
MODELS: Final = "/v1/models"
WEIGHT_INFO: Final = "/weight_info"
LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER: Final = "/v1/unload_lora_adapter"

ID_PREFIX: Final = "generate-tokens-"
"""vLLM adds it to GENERATE ids; aborts need the full id."""

RANDOM: Final = "0"
"""Replaces the digest of the weights that a server starts with."""

MARK_DIGITS: Final = 7
"""Hexadecimal digits of a digest in a mark, which has 32 bits."""

LOGPROB_TEMPERATURE: Final = "logprob_temperature"
"""Key of `extra_args`: divisor of the logits for log-probs."""

ROUTES_AS: Final = "routes_as"
"""Key of `extra_args`: name under which to keep experts."""

KV_FILE: Final = "kv_file"
"""Key of `extra_args`: file of an imported KV cache."""

KV_COPIED: Final = "copied"
KV_ENDED: Final = "ended"
"""Result of copying a KV cache: copied, or the request is unknown or ended; others: incomplete."""

MARKED: Final = 2
"""`logprobs` for the model's log-prob and the mark, each an entry in the stream."""

BOTH: Final = 3
"""`logprobs` for the sampler's log-prob, too: that of the mark."""

LOGPROB_MIN: Final = -9999.0
"""Value for a log-prob that is not finite."""

SEED_MASK: Final = (1 << 63) - 1
"""Seeds are signed 64-bit."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A log-prob under a token id; vLLM 0.31 names it `token_id:ID`."""

    logprob: float | None
    token_id: int = 0
    token: str = ""

    @property
    def id(self) -> int:
        return int(self.token.partition(":")[2] or self.token_id)


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float | None
    """None, from vLLM 0.31, if it is not a number."""
    top_logprobs: tuple[Entry, ...] = ()
    """The token's own, then its mark's."""


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: tuple[Drawn, ...] | None = None
    token_logprobs: tuple[float, ...] = ()
    """The same from /v1/completions."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an answer in a chunk."""

    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    message: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    error: Trouble = Trouble()


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    """Separate event; absent after an abort."""
    error: Trouble | None = None


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the extension's `dora_open`, or of a stock server's endpoints."""

    version: str
    slots: int
    context_tokens: int
    kv_tokens: int
    vocabulary: int
    device: str
    dtype: str
    lora_rank: int
    """Maximum adapter rank; 0 without adapters."""
    max_resident_versions: int
    weights: str = RANDOM
    """Digest of the loaded weights."""
    sleeps: bool = False
    stock: bool = False


class KeptPart(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of an attempt."""

    attempt: str
    start: int
    end: int


class KeptExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts of parts, in order; None if not kept."""

    parts: tuple[Routes | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A sampled token; `mark` names its weights and adapter, 0 from a stock server."""

    token: int
    logprob: float
    sampler_logprob: float
    mark: int


_CHUNK = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """Decode an event. Raises ResourceError."""
    try:
        return _CHUNK.decode(data)
    except msgspec.DecodeError as error:
        raise ResourceError(f"vLLM's server sent no chunk of tokens: {error}") from None


def read_refusal(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=Refusal).error.message or quoted(answer)
    except msgspec.DecodeError:
        return quoted(answer)


def tokens_of(choice: Choice, params: SamplingParams) -> list[Token]:
    """Return the tokens of a choice; missing log-probs are NaN. Raises ResourceError."""
    ids = choice.token_ids or ()
    logprobs = choice.logprobs or Logprobs()
    drawn = logprobs.content or [Drawn(logprob=logprob) for logprob in logprobs.token_logprobs]
    if len(drawn) != len(ids):
        raise ResourceError(f"vLLM's server sent {len(ids)} tokens with {len(drawn)} log-probs")
    tokens: list[Token] = []
    for token, sample in zip(ids, drawn, strict=True):
        mark = sample.top_logprobs[-1] if sample.top_logprobs else None
        logprob = _finite(sample.logprob)
        drawn_with = logprob if mark is None or one_logprob(params) else _finite(mark.logprob)
        tokens.append(
            Token(
                token=token,
                logprob=logprob,
                sampler_logprob=0.0 if params.temperature == 0 else drawn_with,
                mark=0 if mark is None else mark.id,
            )
        )
    return tokens


def policy_mark(weights: str, adapter: int) -> int:
    """Return the mark of tokens from weights with this digest and an adapter's id, 0 without one.

    The sampler sends it as a token id with each log-prob. It is negative: no token has it.
    """
    return -1 - int(weights[:MARK_DIGITS], 16) - adapter


def generate_body(
    attempt: str,
    sequence: list[int],
    params: SamplingParams,
    *,
    seed: int,
    max_tokens: int,
    salt: str,
    adapter: str,
    skip_prefix_cache: bool = False,
    kv: str = "",
) -> dict[str, Any]:
    """Return the body of a GENERATE request.

    The prefix cache matches equal `salt` only. `kv` is the file of an imported cache.
    """
    return {
        **({"model": adapter} if adapter else {}),
        "request_id": attempt,
        "token_ids": sequence,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
        "sampling_params": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": seed & SEED_MASK,
            "max_tokens": max_tokens,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": MARKED if one_logprob(params) else BOTH,
            **({"skip_reading_prefix_cache": True} if skip_prefix_cache else {}),
            **extra_args(params, attempt, kv),
        },
    }


def extra_args(params: SamplingParams, attempt: str = "", kv: str = "") -> dict[str, Any]:
    """Return `extra_args` for sampler, expert capture and KV connector."""
    extra: dict[str, Any] = {}
    if params.logprob_temperature != 1:
        extra[LOGPROB_TEMPERATURE] = params.logprob_temperature
    if params.routes and attempt:
        extra[ROUTES_AS] = attempt
    if kv:
        extra[KV_FILE] = kv
    return {"extra_args": extra} if extra else {}


def one_logprob(params: SamplingParams) -> bool:
    """Return whether the model's log-prob is also the sampler's."""
    return params.temperature == 0 or params.plain


def _finite(logprob: float | None) -> float:
    return float("nan") if logprob is None or logprob <= LOGPROB_MIN else logprob


def quoted(answer: bytes) -> str:
    """Return the start of a response, for an error."""
    return answer[:QUOTED_CHARACTERS_MAX].decode(errors="replace").strip()
