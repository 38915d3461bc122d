"""What the vLLM engine knows of its running requests; decides when one emits and when it ends.

vLLM decides that too, by the limits it was given; here stop strings are watched for, tokens are
held back until they are asked for, and a log-prob that is no number ends its request. It imports
no vLLM.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.producers.engines.port import (
    EngineEvent,
    EngineRequest,
    Kv,
    RequestFinished,
    StopReason,
    TokensSampled,
)
from dora_pipe.producers.engines.stops import StopText

REASONS: Final[dict[str, StopReason]] = {"stop": "stop", "length": "length"}
"""vLLM's finish reasons that are ends of a request here; any other is an error."""


MIN_P_AND_TOP_P: Final = "vLLM applies min_p before top_p, which gives another distribution"


@dataclass(slots=True, kw_only=True)
class Row:
    """A request in its slot. A stay is its time in vLLM: it has several when weights change."""

    request: EngineRequest
    stops: StopText | None
    arrival: int
    stay: str = ""
    """The id that vLLM was given for the present stay."""
    adapter: int = 0
    """vLLM's id of the adapter that the stay is under; 0 without one."""
    weights: str = ""
    """Digest of the version that the stay is under."""
    kv: Kv | None = None
    """The KV cache that it came with, until a stay begins with it."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampler_logprobs: list[float] = field(default_factory=list)
    sent: int = 0
    """Tokens that went out in events."""
    cached: int = 0
    """Positions in vLLM's KV cache, as far as its answers tell: a prompt counts when it is done."""
    first_ns: int = 0

    @property
    def sequence(self) -> list[int]:
        """What it came with, and what was sampled."""
        return [*self.request.token_ids, *self.tokens]

    @property
    def pending(self) -> bool:
        """Whether tokens are held back."""
        return len(self.tokens) > self.sent

    def take(
        self, tokens: list[int], logprobs: list[float], sampler_logprobs: list[float]
    ) -> StopReason | None:
        """New tokens; why the request ends by them, as far as that is decided here.

        What follows a stop string, or a log-prob that is not finite with its token, is dropped.
        """
        for token, logprob, sampler_logprob in zip(tokens, logprobs, sampler_logprobs, strict=True):
            if not math.isfinite(logprob):
                return "error"
            self.tokens.append(token)
            self.logprobs.append(logprob)
            self.sampler_logprobs.append(sampler_logprob)
            if self.stops is not None and self.stops.feed(token):
                return "stop"
        return None

    def due(self) -> bool:
        """Whether as many tokens are held back as its events shall have."""
        every = self.request.emit_every
        return every > 0 and len(self.tokens) - self.sent >= every

    def emit(self) -> TokensSampled:
        """What is held back."""
        start, self.sent = self.sent, len(self.tokens)
        return TokensSampled(
            request=self.request.request,
            token_ids=self.tokens[start:],
            logprobs=self.logprobs[start:],
            sampler_logprobs=self.sampler_logprobs[start:],
            first_token_ns=self.first_ns,
        )

    def end(self, reason: StopReason, said: str = "") -> list[EngineEvent]:
        """Its last events; `said` is what vLLM has to say of an error."""
        error = said or None
        if reason == "error" and error is None:
            at = len(self.request.token_ids) + len(self.tokens)
            error = f"the log-prob of token {at} is not finite, or vLLM ended the request with it"
        last = RequestFinished(request=self.request.request, reason=reason, error=error)
        return [self.emit(), last] if self.pending else [last]
