"""Calls, independent of their API.

Keys are supported (fields, `NO_EFFECT`), rejected (`REFUSED`), or recorded. The setting
`task.unsupported_sampling = "refuse"` rejects these, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from dora_pipe.config import model
from dora_pipe.producers.sessions.conversations import Tools
from dora_pipe.producers.tasks.messages import NoAnswer, normal
from dora_pipe.producers.tasks.task import Turn
from dora_pipe.schemas.control import FinishReason

CHOICES_MAX: Final = 128
"""Maximum `n`, as in OpenAI's API."""

STOPS_MAX: Final = 32
STOP_CHARACTERS_MAX: Final = 256
"""Stop strings are searched after every token."""

CALLER_CHARACTERS_MAX: Final = 100
ASKED_BYTES_MAX: Final = 1024
"""Maximum of a recorded setting; longer ones are recorded as a digest."""

Api = Literal["chat", "responses", "messages", "generate"]

Limit = Annotated[int, Meta(ge=1)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_MAX)]
Stop = Annotated[str, Meta(max_length=STOP_CHARACTERS_MAX)]
Stops = Annotated[list[Stop], Meta(max_length=STOPS_MAX)]

NEUTRAL: Final[Mapping[str, Any]] = {
    "add_generation_prompt": True,
    "background": False,
    "best_of": 1,
    "continue_final_message": False,
    "detokenize": True,
    "documents": [],
    "echo": False,
    "frequency_penalty": 0,
    "functions": [],
    "ignore_eos": False,
    "include": [],
    "include_stop_str_in_output": False,
    "length_penalty": 1,
    "logit_bias": {},
    "mcp_servers": [],
    "min_tokens": 0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stream": False,
    "top_logprobs": 0,
    "truncation": "disabled",
    "use_beam_search": False,
}
"""Values without effect, besides null."""

NO_EFFECT: Final = frozenset(
    (
        "betas",
        "cache_control",
        "cache_salt",
        "inference_geo",
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    )
)
"""Keys that change neither prompt nor sampling."""

REFUSED: Final = frozenset(
    (
        "add_generation_prompt",
        "add_special_tokens",
        "audio",
        "background",
        "best_of",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "echo",
        "function_call",
        "functions",
        "mcp_servers",
        "modalities",
        "previous_response_id",
        "prompt",
        "prompt_embeds",
        "stream",
        "top_logprobs",
        "truncate_prompt_tokens",
        "truncation",
        "web_search_options",
    )
)
"""Keys that change the prompt or the answer's form."""

FOLLOWED: Final = ("temperature", "top_p", "top_k", "min_p")
"""Keys recorded only if different from [sampling]."""

SETTINGS_MAX: Final = 64

TEXT_PARTS: Final = ("text", "input_text", "output_text")


Body = TypeVar("Body", bound=msgspec.Struct)


class Refused(Exception):
    """A call rejected with HTTP status, code and message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """A call, independent of its API."""

    api: Api
    messages: tuple[dict[str, Any], ...] = ()
    """Normalized; empty: use `token_ids`."""
    tools: Tools = ()
    token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    choices: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Stop ids besides the run's."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Sampling settings and unknown keys."""
    template: Mapping[str, Any] = field(default_factory=dict)
    caller: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Sample of one choice."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: FinishReason
    prompt_tokens: int
    turn: Turn = field(default_factory=lambda: Turn(text=""))
    """Parsed turn; empty without messages."""
    stop: str = ""
    """Stop string that ended the text."""


def asked_of(settings: Mapping[str, Any], run: model.Sampling) -> dict[str, Any]:
    """Return settings that differ from the run's."""
    shortened: dict[str, Any] = {}
    for name, value in settings.items():
        off = -1 if name == "top_k" else None  # vLLM: all tokens
        if name not in FOLLOWED or value not in (off, getattr(run, name)):
            shortened[name] = _short(value)
    return shortened


def _short(value: Any) -> Any:
    written = msgspec.json.encode(value)
    if len(written) <= ASKED_BYTES_MAX:
        return value
    return f"{len(written)} bytes, sha256 {hashlib.sha256(written).hexdigest()}"


def decoded(body: bytes | dict[str, Any], kind: type[Body]) -> tuple[Body, dict[str, Any]]:
    """Parse a JSON body; return supported keys and other settings. Raises Refused."""
    try:
        plain = msgspec.json.decode(body) if isinstance(body, bytes) else body
        return msgspec.convert(plain, kind), settings_of(plain, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, "invalid_request", f"invalid request: {error}") from None


def settings_of(plain: Mapping[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return keys with an effect that an API lacks. Raises Refused."""
    settings = {
        key: value
        for key, value in plain.items()
        if key not in kind.__struct_fields__
        and key not in NO_EFFECT
        and value is not None
        and (key not in NEUTRAL or value != NEUTRAL[key])
    }
    for key, value in settings.items():
        if key in REFUSED:
            raise Refused(400, "unsupported", f"{key}: {_short(value)!r} is not supported")
    if len(settings) > SETTINGS_MAX or any(len(key) > CALLER_CHARACTERS_MAX for key in settings):
        raise Refused(400, "invalid_request", f"more than {SETTINGS_MAX} unknown keys")
    return settings


def template_of(kwargs: Mapping[str, Any] | None, thinking: bool | None) -> dict[str, Any]:
    return {**(kwargs or {}), **({} if thinking is None else {"enable_thinking": thinking})}


def check_template(template: Mapping[str, Any], run: Mapping[str, Any]) -> None:
    """Raise Refused for variables that differ from the run's."""
    differing = [name for name, value in template.items() if name not in run or run[name] != value]
    if differing:
        raise Refused(
            400,
            "unsupported",
            f"chat_template_kwargs: {', '.join(differing)} differ from the run:"
            " set task.chat_template_kwargs",
        )


def messages_of(given: Any) -> tuple[dict[str, Any], ...]:
    """Normalize messages. Raises Refused."""
    try:
        return normal(given)
    except NoAnswer as error:
        raise Refused(400, "invalid_request", str(error)) from None


def tools_of(given: Sequence[Mapping[str, Any]] | None, choice: Any) -> Tools:
    """Return function tools. Raises Refused."""
    named = choice.get("type") if isinstance(choice, Mapping) else choice
    if named not in (None, "auto", "none"):
        raise Refused(
            400,
            "unsupported",
            f"tool_choice: `{named}` is not supported: use `auto` or `none`",
        )
    for index, tool in enumerate(given or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, Mapping):
            kind = tool.get("type")
            raise Refused(
                400,
                "unsupported",
                f"tools[{index}]: of type `{kind}`; only functions are supported",
            )
        if not isinstance(function.get("name"), str):
            raise Refused(400, "invalid_request", f"tools[{index}].function.name is not text")
    return () if named == "none" else [dict(tool) for tool in given or ()]


def stops_of(given: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else given or ()
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def text_of(content: Any, where: str) -> str:
    """Return a text, or the joined texts of parts. Raises Refused."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type", "text") if isinstance(part, Mapping) else ""
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise unsupported(part, where)
        texts.append(part["text"])
    return "".join(texts)


def unsupported(part: Any, where: str) -> Refused:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    return Refused(400, "unsupported", f"{where}: a part of type `{kind}` is not supported")


def add_call(message: dict[str, Any], call_id: Any, name: Any, arguments: Any) -> None:
    """Add a tool call to an assistant's message."""
    function = {"name": name, "arguments": arguments}
    call = {"type": "function", "id": call_id or "", "function": function}
    message.setdefault("tool_calls", []).append(call)


def written(arguments: Any) -> str:
    """Return a call's arguments as JSON."""
    return msgspec.json.encode(arguments).decode()


def caller_of(*given: str | None) -> str:
    named = next((caller for caller in given if caller), "")
    return "".join(char if char.isprintable() else "?" for char in named)[:CALLER_CHARACTERS_MAX]
