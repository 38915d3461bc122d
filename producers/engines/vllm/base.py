"""What both vLLM engines decide alike: which requests and versions they take, and what is left.

One runs vLLM in this process, the other asks a server. A request's time in vLLM is a stay: it has
several when weights change. How a stay begins and ends is theirs. With `lora` versions are adapters
on one base, several of them resident, and a request runs under the adapter of its version. It
imports no vLLM.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dora_pipe.core.clock import Clock
from dora_pipe.producers.engines.base import EngineBase
from dora_pipe.producers.engines.port import (
    COUNTER_SAMPLING,
    INTERRUPTIBLE,
    LORA,
    SLEEP,
    UNASSIGNED_LEFT_OUT,
    EngineRequest,
    Kv,
    SamplingParams,
    StopReason,
    TokensSampled,
)
from dora_pipe.producers.engines.requests import Decode, RunningRequest, stop_text
from dora_pipe.producers.engines.vllm.core import BLOCK_TOKENS, KV_TAG, WEIGHTS_TAG, VllmSettings
from dora_pipe.producers.engines.vllm.lora import LoraVersions
from dora_pipe.schemas.routes import GrowingRoutes, Routes

REASONS: Final[dict[str, StopReason]] = {"stop": "stop", "length": "length"}
"""vLLM's finish reasons that are ends of a request here; any other is an error."""

NO_ALLOCATOR: Final = (
    "vLLM has no allocator there that could let go of memory; an elastic worker sleeps, holds no"
    " request and no version, and keeps its memory"
)

LOG = logging.getLogger(__name__)

MIN_P_AND_TOP_P: Final = "vLLM applies min_p before top_p, which gives another distribution"


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


class VllmEngineBase(EngineBase[VllmRequest]):
    """The part of the engine port that does not depend on where vLLM runs."""

    _versions: LoraVersions
    device: str
    """`cpu`, or what vLLM calls a GPU."""

    def __init__(
        self,
        *,
        slots: int,
        context_tokens: int,
        vocabulary: int,
        decode: Decode | None,
        clock: Clock | None,
        versions: LoraVersions,
        settings: VllmSettings,
        unassigned: bool = False,
    ) -> None:
        super().__init__(
            slots=slots,
            context_tokens=context_tokens,
            versions=versions,
            decode=decode,
            clock=clock,
        )
        self.declares = frozenset({COUNTER_SAMPLING, LORA if versions.adapters else INTERRUPTIBLE})
        self.declares |= {UNASSIGNED_LEFT_OUT} if unassigned else set()
        self._asleep = False
        if settings.sleep:
            self.declares |= {SLEEP}
            if self.device == "cpu":
                LOG.warning("%s on a CPU: %s", self.name, NO_ALLOCATOR)
        self._vocabulary, self._prefix_cache = vocabulary, settings.prefix_cache
        self._block = BLOCK_TOKENS.get(self.device, BLOCK_TOKENS["cuda"])
        self._stays = 0
        self._label = ""
        """vLLM's name of the weights that are loaded; empty before, and while they change."""

    def add(self, request: EngineRequest) -> None:
        """See the port."""
        self._check(request)
        if request.params.min_p and request.params.top_p < 1:
            raise ValueError(f"{request.request}: {MIN_P_AND_TOP_P}")
        stops = stop_text(request, self._decode)
        row = VllmRequest(request=replace(request, kv=None), stops=stops, kv=request.kv)
        self._go_on(row)
        self._rows[request.request] = row

    @property
    def kv_used_tokens(self) -> int:
        """See the port; blocks that vLLM shares between requests count once, and what a server is
        ahead of the steps does not count."""
        size, shared, own = self._block, set[int](), 0
        for row in self._rows.values():
            blocks = row.blocks[: row.cached // size]
            shared.update(blocks)
            own += row.cached - size * len(blocks)
        return own + size * len(shared)

    def _share(self, row: VllmRequest, salt: str) -> None:
        """Note which blocks of a row's prompt vLLM shares with others of this salt."""
        size, known = self._block, hash(salt)
        ids, row.blocks = row.sequence, []
        if self._prefix_cache and not row.unrouted:
            for end in range(size, len(ids), size):  # The last token is computed in any case.
                known = hash((known, *ids[end - size : end]))
                row.blocks.append(known)

    def _extend(
        self,
        row: VllmRequest,
        tokens: list[int],
        logprobs: list[float],
        sampler_logprobs: list[float],
    ) -> StopReason | None:
        """What vLLM sampled for a row; why it ends by that, as far as that is decided here."""
        if not row.tokens:
            row.first_ns = self._clock.wall_ns()
        reason = row.extend(tokens, logprobs, sampler_logprobs)
        row.cached = row.length - 1
        return reason

    def _tokens_left(self, row: VllmRequest) -> int:
        """How many tokens the row may still sample."""
        left = row.request.params.max_tokens - row.request.sampled - len(row.tokens)
        return min(left, self.context_tokens - row.length)

    def _replace(self, held: Any, version: int, digest: str) -> None:
        label, self._label = f"{version}:{digest[:16]}", ""
        # What breaks in there leaves one that takes no request.
        if self._asleep:
            self._wake(WEIGHTS_TAG)
        self._transfer(held, digest, label)
        if self._asleep:  # not before the weights: a GPU need not hold both and what they come by
            self._wake(KV_TAG)
        self._label, self._asleep = label, False

    def _release_memory(self) -> None:
        if SLEEP not in self.declares:
            super()._release_memory()
        self._label = ""
        if self.device != "cpu":
            self._fall_asleep()
            self._asleep = True

    def _fall_asleep(self) -> None:
        """Have vLLM let go of its memory of a GPU."""
        raise NotImplementedError

    def _wake(self, tag: str) -> None:
        """Have vLLM take memory again for what it calls so."""
        raise NotImplementedError

    def _transfer(self, held: Any, digest: str, label: str) -> None:
        """Have vLLM load what was read, under this label."""
        raise NotImplementedError

    def _salt(self, adapter: str) -> str:
        """What vLLM keeps prefixes apart by: weights, and the name of an adapter if there is one.

        Beside emptying its cache, so that blocks of other weights are not even looked up.
        """
        return f"{self._label}+{adapter}" if adapter else self._label

    def _has_weights(self) -> bool:
        return bool(self._label)

    def _emit(self, row: VllmRequest) -> TokensSampled | None:
        return row.emit()

    def _warm_up(self, label: str) -> None:
        """Sample with the random weights of this label: vLLM's first steps take seconds, which here
        nobody waits for, while a worker that has joined would be silent for longer than its lease.
        """
        if self.context_tokens == 1:
            return
        self._label = label
        warm = SamplingParams(max_tokens=2, temperature=0.7)
        with self._versions.without():
            self.add(EngineRequest(request="warm", token_ids=[0], sampled=0, seed=0, params=warm))
            while self._rows:
                self.step()
        self._label = ""
