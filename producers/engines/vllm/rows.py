"""Requests in their slots, and their streams."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dora_pipe.producers.engines.engine import Kv
from dora_pipe.producers.engines.requests import RunningRequest
from dora_pipe.producers.engines.vllm import wire
from dora_pipe.producers.engines.vllm.http import HttpStream
from dora_pipe.schemas.routes import GrowingRoutes, Routes


@dataclass(slots=True, kw_only=True)
class VllmRequest(RunningRequest):
    """A request in its slot, and its current attempt in vLLM."""

    stay: str = ""
    """vLLM's id of the attempt."""
    adapter: int = 0
    """vLLM's id of the adapter; 0 without one."""
    weights: str = ""
    """Weights digest of its version."""
    kv: Kv | None = None
    """Imported KV cache, until an attempt starts from it."""
    cached: int = 0
    """Positions in vLLM's KV cache, inferred from its answers."""
    blocks: list[int] = field(default_factory=list)
    """Hashes of all tokens up to each shared block's end."""
    routes: GrowingRoutes = field(default_factory=GrowingRoutes)

    @property
    def unrouted(self) -> bool:
        """Return whether requested experts are unknown."""
        return self.request.params.routes and self.request.routed < self.length

    def routes_from(self, start: int) -> int:
        """Return the first token of an event's experts; the first event also covers earlier unknown
        tokens."""
        given = len(self.request.token_ids)
        return given + start if start else min(given, self.request.routed)

    def routes_of(self, start: int, end: int) -> Routes | None:
        if not self.request.params.routes:
            return None
        return self.routes.between(self.routes_from(start), len(self.request.token_ids) + end)


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """Response to one attempt."""

    row: VllmRequest
    http: HttpStream
    tokens: deque[wire.Token] = field(default_factory=deque)
    """Tokens that no step has taken."""
    reason: str = ""
    """vLLM's finish reason; usage follows."""
    finish: str = ""
    """The reason, once the stream is complete."""
    trouble: str = ""
    """The server's error."""
    heard: bool = False
    """An event has arrived: the engine core has the request."""
    late: bool = False
    """A step has waited for it in vain."""

    @property
    def ready(self) -> bool:
        """Return whether a step can proceed; the last token waits for the end of the stream."""
        last = bool(self.reason) and not self.finish
        return len(self.tokens) > last or bool(self.finish)
