"""A request in its slot, and its stream in the server."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dora_pipe.producers.engines.port import Kv
from dora_pipe.producers.engines.requests import RunningRequest
from dora_pipe.producers.engines.vllm import wire
from dora_pipe.producers.engines.vllm.http import HttpStream
from dora_pipe.schemas.routes import GrowingRoutes, Routes


@dataclass(slots=True, kw_only=True)
class VllmRequest(RunningRequest):
    """A request in its slot, and its present stay in vLLM.

    vLLM decides when it ends, too, by the limits it was given; here stop strings are watched for,
    and a log-prob that is no number ends its request.
    """

    stay: str = ""
    """The id that vLLM was given for it."""
    adapter: int = 0
    """vLLM's id of the adapter that it is under; 0 without one."""
    weights: str = ""
    """Digest of the version that it is under."""
    kv: Kv | None = None
    """The KV cache that the request came with, until a stay begins with it."""
    cached: int = 0
    """Positions in vLLM's KV cache, as far as its answers tell: a prompt counts when it is done."""
    blocks: list[int] = field(default_factory=list)
    """Prompt blocks that vLLM shares, each by a hash of all tokens up to its end."""
    routes: GrowingRoutes = field(default_factory=GrowingRoutes)
    """Through which experts its tokens went, as far as somebody asked."""

    @property
    def unrouted(self) -> bool:
        """Whether it asks for experts, and nobody knows those of all that it has."""
        return self.request.params.routes and self.request.routed < self.length

    def routes_from(self, start: int) -> int:
        """The first token of an event's entries whose own tokens begin with number `start`: the
        first event has those of tokens before them that are not known."""
        given = len(self.request.token_ids)
        return given + start if start else min(given, self.request.routed)

    def routes_of(self, start: int, end: int) -> Routes | None:
        if not self.request.params.routes:
            return None
        return self.routes.between(self.routes_from(start), len(self.request.token_ids) + end)


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """A row's time in the server, from its request to the last chunk of its answer."""

    row: VllmRequest
    http: HttpStream
    tokens: deque[wire.Token] = field(default_factory=deque)
    """Received and not taken by a step; at most what its request may sample."""
    reason: str = ""
    """vLLM's finish reason, once it has come; what the prompt took comes right behind it."""
    finish: str = ""
    """The same when nothing more is to come."""
    trouble: str = ""
    """What the server said instead of tokens."""
    heard: bool = False
    """A word of it has come: it is in vLLM's engine core."""
    late: bool = False
    """A step waited for it in vain."""

    @property
    def ready(self) -> bool:
        """Whether a step has something to take: the last token comes with the end."""
        last = bool(self.reason) and not self.finish
        return len(self.tokens) > last or bool(self.finish)
