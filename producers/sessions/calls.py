"""A call in the form that all dialects are translated to, and what becomes of it; decides what in a
request is refused, and which settings of it the run does not follow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

from dora_pipe.config import model
from dora_pipe.producers.sessions.conversations import Tools
from dora_pipe.producers.tasks.messages import NoAnswer, normal
from dora_pipe.producers.tasks.port import Turn
from dora_pipe.schemas.control import FinishReason

CHOICES_MAX: Final = 128
"""Of `n`, as OpenAI has it."""

STOPS_MAX: Final = 32
STOP_CHARACTERS_MAX: Final = 256
"""Of what ends a call: each is looked for behind every token."""

CALLER_CHARACTERS_MAX: Final = 100
ASKED_BYTES_MAX: Final = 1024
"""Of one setting that is recorded; of what is longer a digest is."""

Api = Literal["chat", "responses", "messages", "generate"]

NEUTRAL: Final[Mapping[str, Any]] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
    "logit_bias": {},
    "min_tokens": 0,
}
"""Settings that change nothing when they are so; the run follows none of them otherwise."""

UNKNOWN_TO_RUNS: Final = (
    *NEUTRAL,
    "seed",
    "reasoning_effort",
    "reasoning",
    "thinking",
    "verbosity",
)
FOLLOWED: Final = ("temperature", "top_p", "top_k", "min_p")
"""Settings that a run has too ([sampling])."""


class Refused(Exception):
    """A call that is answered with an HTTP status, a code and a sentence.

    Example: ``Refused(400, "unsupported", "tool_choice: `required` is not offered")``.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """What a call wants, whatever it was written in."""

    api: Api
    messages: tuple[dict[str, Any], ...] = ()
    """In normal form; empty: the prompt is `token_ids`."""
    tools: Tools = ()
    token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    choices: int = 1
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    """Beside those of the run."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the sampling, as they were written."""
    caller: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What was sampled for one choice of a call."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish: FinishReason
    prompt_tokens: int
    turn: Turn = field(default_factory=lambda: Turn(text=""))
    """What it says, where the call was of messages."""
    stop: str = ""
    """The caller's string at which its text ends."""


def asked_of(settings: Mapping[str, Any], run: model.Sampling) -> dict[str, Any]:
    """The settings that a call asks for and that the run does not follow."""
    found: dict[str, Any] = {}
    for name in FOLLOWED:
        value = settings.get(name)
        off = -1 if name == "top_k" else None  # vLLM's word for every token
        if value is not None and value not in (off, getattr(run, name)):
            found[name] = _short(value)
    for name in UNKNOWN_TO_RUNS:
        value = settings.get(name)
        if value is not None and value != NEUTRAL.get(name):
            found[name] = _short(value)
    return found


def _short(value: Any) -> Any:
    written = msgspec.json.encode(value)
    if len(written) <= ASKED_BYTES_MAX:
        return value
    return f"{len(written)} bytes, sha256 {hashlib.sha256(written).hexdigest()}"


def decoded(body: bytes, kind: type[Any]) -> Any:
    """A request's body. Raises Refused, naming the place in it."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(400, "invalid_request", f"the body is no such request: {error}") from None


def messages_of(given: Any) -> tuple[dict[str, Any], ...]:
    """Messages in normal form. Raises Refused."""
    try:
        return normal(given)
    except NoAnswer as error:
        raise Refused(400, "invalid_request", str(error)) from None


def tools_of(given: Sequence[Mapping[str, Any]] | None, choice: Any) -> Tools:
    """Tools that are functions; none where the choice is none of them. Raises Refused."""
    named = choice.get("type") if isinstance(choice, Mapping) else choice
    if named not in (None, "auto", "none"):
        raise Refused(
            400,
            "unsupported",
            f"tool_choice: `{named}` is not offered: what a model says is sampled, not forced;"
            " `auto` or `none`",
        )
    for at, one in enumerate(given or ()):
        function = one.get("function")
        if one.get("type", "function") != "function" or not isinstance(function, Mapping):
            kind = one.get("type")
            raise Refused(
                400, "unsupported", f"tools[{at}]: of type `{kind}`; functions are offered"
            )
        if not isinstance(function.get("name"), str):
            raise Refused(400, "invalid_request", f"tools[{at}].function.name is not text")
    return () if named == "none" else [dict(one) for one in given or ()]


def stops_of(given: Any) -> tuple[str, ...]:
    """Stop strings, as one or several. Raises Refused for more than a call may name."""
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if len(found) > STOPS_MAX or any(len(one) > STOP_CHARACTERS_MAX for one in found):
        most = f"{STOPS_MAX} of {STOP_CHARACTERS_MAX} characters"
        raise Refused(400, "invalid_request", f"stop: more than {most}")
    return tuple(dict.fromkeys(one for one in found if one))


def choices_of(given: int | None) -> int:
    """How many answers a call wants. Raises Refused."""
    count = 1 if given is None else given
    if not 1 <= count <= CHOICES_MAX:
        raise Refused(400, "invalid_request", f"n: {count} is not between 1 and {CHOICES_MAX}")
    return count


def most_tokens(*given: int | None) -> int | None:
    """The limit that a call sets under one of several names. Raises Refused."""
    found = [one for one in given if one is not None]
    if any(one < 1 for one in found):
        raise Refused(400, "invalid_request", f"max_tokens: {min(found)} is less than 1")
    return min(found, default=None)


def caller_of(*given: str | None) -> str:
    """What the caller calls itself, by the first of these that says so."""
    named = next((one for one in given if one), "")
    return "".join(one if one.isprintable() else "?" for one in named)[:CALLER_CHARACTERS_MAX]


def settings_of(request: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    for name in (*FOLLOWED, *UNKNOWN_TO_RUNS):
        value = getattr(request, name, None)
        if value is not None:
            yield name, value
