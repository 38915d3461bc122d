"""Checks, stop strings and pending tokens of requests; without torch.

Stop strings are matched in a short window of tokens: decoding all text is quadratic, and a token
may hold part of a character (incremental detokenization of text-generation servers).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence, Sized
from dataclasses import dataclass, field
from typing import Final, Protocol

from dora_pipe.producers.engines.engine import (
    EngineEvent,
    EngineRequest,
    Kv,
    RequestFinished,
    StopReason,
    TokensSampled,
)
from dora_pipe.schemas.routes import Routes

Decode = Callable[[Sequence[int]], str]
"""Incomplete characters decode to U+FFFD."""

WINDOW_TOKENS: Final = 6
"""Known tokens, as context of new ones."""

WINDOW_TOKENS_MAX: Final = 32
"""Limit while the last character is incomplete."""

_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"


class Running(Container[str], Sized, Protocol):
    """Names of running requests."""


def check_request(
    request: EngineRequest, *, running: Running, slots: int, context_tokens: int
) -> None:
    """Raise ValueError for a request that cannot be added; the config checks its parameters."""
    name, tokens = request.request, len(request.token_ids)
    if name in running:
        raise ValueError(f"{name}: is already running")
    if len(running) >= slots:
        raise ValueError(f"{name}: none of the {slots} slots is free")
    if tokens < 1:
        raise ValueError(f"{name}: has no prompt tokens")
    if tokens >= context_tokens:
        raise ValueError(f"{name}: {tokens} tokens leave no room in a context of {context_tokens}")
    if not 0 <= request.sampled <= tokens:
        raise ValueError(f"{name}: {request.sampled} sampled tokens exceed the {tokens} given")
    if request.sampled >= request.params.max_tokens:
        raise ValueError(f"{name}: already has {request.params.max_tokens} tokens")
    if request.emit_every < 0:
        raise ValueError(f"{name}: emit_every {request.emit_every} is negative")


def kv_mismatch(
    request: EngineRequest,
    kv: Kv,
    *,
    layout: str,
    weights: str,
    dtype: str,
    shape: tuple[int, ...],
) -> str | None:
    """Return why a KV cache does not match, or None."""
    if kv.weights != weights:
        return "other weights"
    if kv.layout != layout:
        return "another layout"
    if kv.tokens != len(request.token_ids) - 1 or kv.tokens < 1:
        return "another number of tokens"
    if kv.array.dtype.str != dtype:
        return "another type"
    return None if kv.array.shape == shape else "another shape"


def stop_text(request: EngineRequest, decode: Decode | None) -> StopText | None:
    """Return a matcher, or None. Raises ValueError without `decode`."""
    if not request.params.stop:
        return None
    if decode is None:
        raise ValueError(f"{request.request}: stop strings need an engine that can decode")
    sampled = request.token_ids[len(request.token_ids) - request.sampled :]
    return StopText(decode, request.params.stop, sampled)


class StopText:
    """Matcher of a request's stop strings.

    Example: ``StopText(decode, ("</s>",), sampled=[5, 9]).feed(11)`` is True once the text contains
    ``</s>`` and a part of it is new.
    """

    def __init__(self, decode: Decode, stops: Sequence[str], sampled: Sequence[int]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._keep = max(map(len, self._stops)) - 1
        """Known characters in which a stop string may begin."""
        self._tail = self._end_of(decode(sampled)) if sampled else ""
        self._restart_window(list(sampled))

    def feed(self, token: int) -> bool:
        """Add a token; return whether a stop string ends in the new text."""
        self._window.append(token)
        text = self._decode(self._window)
        new = text[len(self._known) :]
        if self._ends_in(new):
            return True
        if not new.endswith(_INCOMPLETE) or len(self._window) >= WINDOW_TOKENS_MAX:
            self._tail = self._end_of(self._tail + new)
            self._restart_window(self._window)
        return False

    def _ends_in(self, new: str) -> bool:
        # Matches in known text were reported, or belong to an earlier turn.
        text, checked = self._tail + new, len(self._tail)
        return any(text.find(stop, max(0, checked - len(stop) + 1)) >= 0 for stop in self._stops)

    def _end_of(self, text: str) -> str:
        return text.rstrip(_INCOMPLETE)[-self._keep :] if self._keep else ""

    def _restart_window(self, tokens: list[int]) -> None:
        self._window = tokens[-WINDOW_TOKENS:]
        text = self._decode(self._window) if self._window else ""
        self._known = text.rstrip(_INCOMPLETE)


@dataclass(slots=True, kw_only=True)
class RunningRequest:
    """A request in its slot, with its samples."""

    request: EngineRequest
    stops: StopText | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    sent: int = 0
    """Emitted tokens."""
    first_ns: int = 0

    @property
    def sampled(self) -> int:
        """Return the tokens that count against `max_tokens`."""
        return self.request.sampled + len(self.tokens)

    @property
    def sequence(self) -> list[int]:
        return [*self.request.token_ids, *self.tokens]

    @property
    def length(self) -> int:
        return len(self.request.token_ids) + len(self.tokens)

    def append(self, token: int, logprob: float, sampler_logprob: float) -> StopReason | None:
        """Append a token; return "stop" after a stop string, "error" for a log-prob that is not
        finite, whose token is dropped."""
        if not math.isfinite(logprob):
            return "error"
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampler_logprobs.append(sampler_logprob)
        return "stop" if self.stops is not None and self.stops.feed(token) else None

    def sample(
        self, token: int, logprob: float, sampler_logprob: float, context_tokens: int
    ) -> StopReason | None:
        """Append a token; return why the request ends, by stop ids and limits too."""
        reason, params = self.append(token, logprob, sampler_logprob), self.request.params
        if reason is not None:
            return reason
        if token in params.stop_ids:
            return "stop"
        full = self.length >= context_tokens or self.sampled >= params.max_tokens
        return "length" if full else None

    def emit(self) -> TokensSampled | None:
        start, self.sent = self.sent, len(self.tokens)
        if start == self.sent:
            return None
        return TokensSampled(
            request=self.request.request,
            token_ids=self.tokens[start:],
            logprobs=self.logprobs[start:],
            sampler_logprobs=self.sampler_logprobs[start:],
            first_token_ns=self.first_ns,
            routes=self.routes_of(start, self.sent),
        )

    def routes_of(self, start: int, end: int) -> Routes | None:
        """Return the experts of sampled tokens [start, end), if known."""
        return None

    def emits(self, reason: StopReason | None) -> bool:
        return reason is not None or 0 < self.request.emit_every <= len(self.tokens) - self.sent

    def events(self, reason: StopReason | None, message: str = "") -> list[EngineEvent]:
        """Return the events of a step; `message` describes an error."""
        if not self.emits(reason):
            return []
        sampled = self.emit()
        events: list[EngineEvent] = [] if sampled is None else [sampled]
        if reason is None:
            return events
        if reason == "error" and not message:
            message = f"the log-prob of token {self.length} is not finite"
            message += ", or the engine ended the request with it"
        last = RequestFinished(request=self.request.request, reason=reason, error=message or None)
        return [*events, last]
