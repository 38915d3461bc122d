"""What is said to a vLLM server and what it says, as records; decides what a request asks of vLLM.

Tokens go in and out as ids over /inference/v1/generate, vLLM's own way beside the OpenAI paths: no
text is made of them, and the last chunk of a stream names the weights that every token came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.engines.port import SamplingParams
from dora_pipe.schemas.routes import Routes

QUOTED_CHARACTERS_MAX: Final = 300
"""Of an answer that an error quotes."""

GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/abort_requests"
RPC: Final = "/collective_rpc"
HEALTH: Final = "/health"
MODELS: Final = "/v1/models"
LOAD_ADAPTER: Final = "/v1/load_lora_adapter"
UNLOAD_ADAPTER: Final = "/v1/unload_lora_adapter"

ID_PREFIX: Final = "generate-tokens-"
"""vLLM puts this before the id of a request that came over GENERATE; an abort wants the whole."""

SAMPLED_FROM: Final = -1
"""Among the log-probs of a token, the id under which its log-prob in the distribution that it was
drawn from stands. A stream has no other place for it that belongs to the token."""

NO_TOKEN: Final = -2
"""The id of what else stands there."""

LOGPROB_TEMPERATURE: Final = "logprob_temperature"
"""In `extra_args` of a request: what logits are divided by before its log-probs are taken."""

ROUTES_AS: Final = "routes_as"
"""In `extra_args` of a request to a server: under which name its experts are kept; none without."""

KV_FILE: Final = "kv_file"
"""In `extra_args` of a request to a server: the file of the KV cache that it begins with."""

KV_COPIED: Final = "copied"
KV_ENDED: Final = "ended"
"""What a server's process says of the KV cache of a request: it is in the file; or it knows of no
such request, or no more. Anything else: vLLM has not all of it."""

BOTH: Final = 2
"""`logprobs` of a request that wants both kinds: vLLM answers with the token and one place more."""

LOGPROB_MIN: Final = -9999.0
"""What vLLM writes for a log-prob that is no finite number."""

SEED_MASK: Final = (1 << 63) - 1
"""vLLM takes seeds as signed 64-bit numbers."""


class OtherLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A log-prob beside that of the sampled token."""

    token_id: int
    logprob: float


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled token's log-probs."""

    logprob: float
    rank: int | None = None
    """Of a server with adapters: vLLM's id of the one that the token was computed under. Ranks of
    tokens are asked for by nobody, and a stream has no other place for it."""
    top_logprobs: tuple[OtherLogprob, ...] = ()


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of the tokens of a chunk."""

    content: tuple[Drawn, ...] | None = None


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of an answer came from the weights with this label."""

    version: str
    start: int
    end: int


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """What a chunk has of an answer; vLLM gives several only to who asks for them."""

    token_ids: tuple[int, ...] | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: tuple[Span, ...] | None = None
    """In the last chunk, of the whole answer."""


class Trouble(msgspec.Struct, frozen=True, kw_only=True):
    """Why a stream ends early."""

    message: str = ""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer with another status than 200 holds."""

    error: Trouble = Trouble()


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Of a prompt's tokens."""

    cached_tokens: int = 0
    """Found in vLLM's prefix cache."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What a request has taken, said behind its last token."""

    prompt_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a stream."""

    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    """In an event of its own, which has no choices; none where a stream was aborted."""
    error: Trouble | None = None


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself; see the extension's `dora_open`."""

    version: str
    slots: int
    context_tokens: int
    kv_tokens: int
    vocabulary: int
    device: str
    dtype: str
    lora_rank: int
    """Of the adapters that it has room for; 0 without any."""
    versions_resident: int
    sleeps: bool = False
    """Its memory of a GPU is from an allocator that can let go of it."""


class KeptPart(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a stay, whose experts are wanted."""

    stay: str
    start: int
    end: int


class KeptExperts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's worker has kept of such parts, in their order; None where it has not."""

    parts: tuple[Routes | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A sampled token with both log-probs. `under` is the adapter's id, where there are any."""

    token: int
    logprob: float
    sampler_logprob: float
    under: int


_CHUNK = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """An event's data. Raises ResourceError for what is none."""
    try:
        return _CHUNK.decode(data)
    except msgspec.DecodeError as error:
        raise ResourceError(f"vLLM's server sent no chunk of tokens: {error}") from None


def read_refusal(answer: bytes) -> str:
    """What it says, in its own words where it is no record."""
    try:
        return msgspec.json.decode(answer, type=Refusal).error.message or quoted(answer)
    except msgspec.DecodeError:
        return quoted(answer)


def tokens_of(choice: Choice, params: SamplingParams) -> list[Token]:
    """Its tokens; a log-prob that vLLM could not tell is NaN. Raises ResourceError without any."""
    ids = choice.token_ids or ()
    drawn = (choice.logprobs.content if choice.logprobs is not None else None) or ()
    if len(drawn) != len(ids):
        raise ResourceError(f"vLLM's server sent {len(ids)} tokens with {len(drawn)} log-probs")
    found: list[Token] = []
    for token, one in zip(ids, drawn, strict=True):
        logprob = one.logprob if one.logprob > LOGPROB_MIN else float("nan")
        other = _sampler_logprob(one, logprob, params)
        under = one.rank or 0
        found.append(Token(token=token, logprob=logprob, sampler_logprob=other, under=under))
    return found


def generate_body(
    stay: str,
    sequence: list[int],
    params: SamplingParams,
    *,
    seed: int,
    max_tokens: int,
    salt: str,
    adapter: str,
    whole: bool = False,
    kv: str = "",
) -> dict[str, Any]:
    """The body of a GENERATE request, under an adapter of this name; without one if it is empty.

    What vLLM has cached of prompts is looked up among those of the same `salt` alone; of a request
    that must be computed `whole`, not at all. `kv` is the file of the KV cache that it begins with.
    """
    return {
        **({"model": adapter} if adapter else {}),
        "request_id": stay,
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
            "logprobs": 0 if one_logprob(params) else BOTH,
            **({"skip_reading_prefix_cache": True} if whole else {}),
            **extra_args(params, stay, kv),
        },
    }


def extra_args(params: SamplingParams, stay: str = "", kv: str = "") -> dict[str, Any]:
    """What is told inside vLLM of a request, as one of vLLM's own settings: to our sampler, of a
    `stay` in a server to who keeps experts, and of the file of a KV cache to our connector."""
    told: dict[str, Any] = {}
    if params.logprob_temperature != 1:
        told[LOGPROB_TEMPERATURE] = params.logprob_temperature
    if params.routes and stay:
        told[ROUTES_AS] = stay
    if kv:
        told[KV_FILE] = kv
    return {"extra_args": told} if told else {}


def one_logprob(params: SamplingParams) -> bool:
    """Whether the log-prob of the model says all: it is sampled from, or nothing is drawn."""
    return params.temperature == 0 or params.plain


def _sampler_logprob(one: Drawn, logprob: float, params: SamplingParams) -> float:
    if params.temperature == 0:
        return 0.0
    if params.plain:
        return logprob
    for place in one.top_logprobs:
        if place.token_id == SAMPLED_FROM:
            return place.logprob
    raise ResourceError(
        "vLLM's server did not send the log-prob that a token was drawn with",
        hint="is another engine using this server?",
    )


def quoted(answer: bytes) -> str:
    """What an answer says, as far as an error quotes it."""
    return answer[:QUOTED_CHARACTERS_MAX].decode(errors="replace").strip()
