"""The vLLM engine: a client of a vLLM server.

A running request is one stream of POST /inference/v1/generate. The server runs ahead; `step` takes
one token per stream and waits at most STEP_WAIT_MS for late ones. Tokens no step has taken are
dropped when a request leaves or weights change; seed and position draw them again. Each entry of a
request into vLLM is one attempt.

A load first checks the file (`dora_read`), which may reject it. Then /pause aborts all requests,
vLLM loads, clears its prefix cache, and /resume continues. The sampler marks each token with its
weights and adapter (`wire.policy_mark`). Tokens with another mark raise InvariantBroken.

KV caches are exchanged through files (`kv_remote`). A request that has ended in the server is not
exported; the next steps emit its last tokens.

A server that exits, breaks a connection or fails its health check raises ResourceError; the worker
exits and its requests are reassigned.
"""

from __future__ import annotations

import logging
import selectors
import uuid
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from dora_pipe.config.workers import Vllm
from dora_pipe.core.errors import InvariantBroken, ResourceError
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.engines.base import EngineBase
from dora_pipe.producers.engines.engine import (
    COUNTER_SAMPLING,
    KV_EXPORT,
    LORA,
    PARTIAL_ROLLOUT,
    ROUTES,
    SLEEP,
    UNASSIGNED_LEFT_OUT,
    EngineEvent,
    EngineRequest,
    Exported,
    Kv,
    SamplingParams,
    StopReason,
    TokensSampled,
)
from dora_pipe.producers.engines.requests import Decode, RunningRequest, stop_text
from dora_pipe.producers.engines.vllm import wire
from dora_pipe.producers.engines.vllm.client import (
    SHARED,
    VllmServerClient,
    check_room,
    check_sleep,
)
from dora_pipe.producers.engines.vllm.core import (
    BLOCK_TOKENS,
    DEFAULTS,
    KV_TAG,
    TESTED,
    WEIGHTS_TAG,
)
from dora_pipe.producers.engines.vllm.http import NOT_FOUND, Address, HttpStream
from dora_pipe.producers.engines.vllm.kv_remote import ENDED, NO_ROOM, RemoteCaches
from dora_pipe.producers.engines.vllm.options import described
from dora_pipe.producers.engines.vllm.process import ServerProcess
from dora_pipe.producers.engines.vllm.stock import SAMPLING, client_of, has_logprobs
from dora_pipe.producers.engines.vllm.versions import LoraVersions
from dora_pipe.producers.engines.vllm.wire import quoted
from dora_pipe.schemas.routes import GrowingRoutes, Routes
from dora_pipe.store.model_dir import unassigned_ids

STEP_WAIT_MS: Final = 1_000
"""Maximum wait of a step; a late row is not waited for again until it has a token."""

SILENCE_MS: Final = 30_000
"""Silence of all streams before a health check."""


ENDED_ATTEMPTS_MAX: Final = 64
"""Finished attempts to report even without a query for experts."""


REASONS: Final[dict[str, StopReason]] = {"stop": "stop", "length": "length"}
"""Finish reasons of vLLM; others are errors."""

NO_ALLOCATOR: Final = (
    "vLLM has no allocator there that releases memory; a colocated worker sleeps, holds no"
    " request and no version, and keeps its memory"
)

MIN_P_AND_TOP_P: Final = "vLLM applies min_p before top_p, which gives another distribution"

LOG = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class VllmRequest(RunningRequest):
    """A request in its slot, and its current attempt in vLLM."""

    attempt: str = ""
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
    row: VllmRequest
    http: HttpStream
    tokens: deque[wire.Token] = field(default_factory=deque)
    """Tokens that no step has taken."""
    reason: str = ""
    """vLLM's finish reason; usage follows."""
    finish: str = ""
    """The reason, once the stream is complete."""
    error: str = ""
    """The server's error."""
    started: bool = False
    """An event has arrived: the engine core has the request."""
    late: bool = False
    """A step has waited for it in vain."""

    @property
    def ready(self) -> bool:
        """Return whether a step can proceed; the last token waits for the end of the stream."""
        last = bool(self.reason) and not self.finish
        return len(self.tokens) > last or bool(self.finish)


def _start_server(
    model_dir: Path, settings: Vllm, *, sleep: bool, **sizes: int
) -> VllmServerClient:
    process = ServerProcess.start(model_dir, settings, sleep=sleep, **sizes)
    return VllmServerClient(process.address, process)


class VllmEngine(EngineBase[VllmRequest]):
    """Engine over a vLLM server, with random weights before `load`.

    Example::

        engine = VllmEngine(Path("model"), slots=64, context_tokens=1024)
        engine.load(Path("weights.safetensors"), version=3, digest=digest)
    """

    name = "vllm"
    _versions: LoraVersions

    def __init__(
        self,
        model_dir: Path,
        *,
        slots: int,
        context_tokens: int,
        threads: int = 1,
        settings: Vllm = DEFAULTS,
        sleep: bool = False,
        address: Address | None = None,
        decode: Decode | None = None,
        clock: Clock | None = None,
        lora_rank: int = 0,
        max_resident_versions: int = 1,
        routes: bool = False,
    ) -> None:
        """Connect to `address`, or start a server.

        `sleep` enables the release of memory, `routes` routed experts; `lora_rank` and
        `max_resident_versions` bound the adapters on one base. Raises ConfigError for sizes that do
        not fit, PolicyError for an unsupported model, ResourceError if the server does not start.
        """
        ids = unassigned_ids(model_dir)
        sizes = {"slots": slots, "context_tokens": context_tokens, "threads": threads}
        adapters = {"lora_rank": lora_rank, "max_resident_versions": max_resident_versions}
        if address is not None:
            self._server = client_of(address)
        else:
            self._server = _start_server(model_dir, settings, sleep=sleep, **sizes, **adapters)
        with ExitStack() as undo:
            undo.callback(self._server.close, [])
            self._facts = facts = self._server.open(routes=routes, unassigned=ids)
            check_room(facts, slots, context_tokens, lora_rank, max_resident_versions)
            check_sleep(facts, needed=sleep)
            super().__init__(
                slots=slots,
                context_tokens=context_tokens,
                versions=LoraVersions(self._server, rank=lora_rank, most=max_resident_versions),
                decode=decode,
                clock=clock,
            )
            self._set_up(settings.args, sleep=sleep)
            self._caches = RemoteCaches(self._server)
            undo.callback(self._caches.close)
            self._layout = self._caches.facts.layout
            capabilities = {
                COUNTER_SAMPLING: True,
                LORA if lora_rank else PARTIAL_ROLLOUT: True,
                UNASSIGNED_LEFT_OUT: bool(ids),
                SLEEP: sleep,
                KV_EXPORT: bool(self._layout),
                ROUTES: routes,
            }
            self.declares = frozenset(
                name for name, has in capabilities.items() if has and not facts.stock
            )
            if not facts.stock:
                self._warm_up()
            undo.pop_all()

    def _set_up(self, args: Mapping[str, Any], *, sleep: bool) -> None:
        facts = self._facts
        self.version = facts.version + described(args)
        self.device, self.dtype, self.stock = facts.device, facts.dtype, facts.stock
        if not facts.version.startswith(TESTED):
            LOG.warning("vLLM %s is untested; tested: %s", facts.version, "x, ".join(TESTED) + "x")
        self._vocabulary = facts.vocabulary
        self._prefix_cache = args.get("enable_prefix_caching", True) and not facts.stock
        self._block = BLOCK_TOKENS.get(self.device, BLOCK_TOKENS["cuda"])
        self._selector = selectors.DefaultSelector()
        self._streams: dict[str, Stream] = {}
        """Streams by request."""
        self._prefix = uuid.uuid4().hex[:12]
        self._attempts, self._last_data_ns = 0, 0
        self._ended_attempts: list[str] = []  # finished attempts with experts in the server
        self._label = ""
        """Version and digest of the loaded weights; empty before and during a load."""
        self._weights = facts.weights
        """Digest of the server's weights."""
        self._asleep = False
        if sleep and self.device == "cpu":
            LOG.warning("%s on a CPU: %s", self.name, NO_ALLOCATOR)

    @property
    def kv_tokens(self) -> int:
        return min(self._facts.kv_tokens, self.slots * self.context_tokens)

    def add(self, request: EngineRequest) -> None:
        self._check(request)
        if request.params.min_p and request.params.top_p < 1:
            raise ValueError(f"{request.request}: {MIN_P_AND_TOP_P}")
        if self.stock and not has_logprobs(request.params):
            raise ValueError(f"{request.request}: {SAMPLING}")
        stops = stop_text(request, self._decode)
        row = VllmRequest(request=replace(request, kv=None), stops=stops, kv=request.kv)
        self._resume(row)
        self._rows[request.request] = row

    @property
    def kv_used_tokens(self) -> int:
        """Return used tokens; shared blocks count once, untaken tokens do not."""
        size, shared, own = self._block, set[int](), 0
        for row in self._rows.values():
            blocks = row.blocks[: row.cached // size]
            shared.update(blocks)
            own += row.cached - size * len(blocks)
        return own + size * len(shared)

    def kv_error(self, request: EngineRequest) -> str | None:
        kv, why = request.kv, super().kv_error(request)
        if kv is None or why is not None:
            return why
        return None if self._caches.has_room(kv) else NO_ROOM

    def export(self, request: str) -> Exported | None:
        row = self._rows.get(request)
        if row is None:
            return None
        ended = self._layout and self._streams[request].reason
        kv = ENDED if ended else self._caches.copied(row.attempt, row.cached, row.weights)
        if kv == ENDED:
            return None
        exported = Exported(sampled=self._emit(row), kv=kv)
        self._release(row)
        return exported

    def step(self) -> list[EngineEvent]:
        self._versions.listen()
        if not self._rows:
            return []
        self._gather()
        events: list[EngineEvent] = []
        running: list[str] = []
        ready = [stream for stream in self._streams.values() if stream.ready]
        advanced = [(stream, self._advance(stream)) for stream in ready]
        self._ask_routes([stream.row for stream, reason in advanced if stream.row.emits(reason)])
        for stream, reason in advanced:
            events += stream.row.events(reason, stream.error)
            if reason is not None:
                attempt = self._free_slot(stream.row)
                running += [] if stream.finish else [attempt]
        self._server.abort(running)
        return events

    def close(self) -> None:
        """End the server if started here, else its requests."""
        attempts = [self._free_slot(row) for row in list(self._rows.values())]
        self._selector.close()
        self._versions.close()
        self._server.close(attempts)
        self._caches.close()

    def _gather(self) -> None:
        until_ns = self._clock.now_ns() + STEP_WAIT_MS * 1_000_000
        missing = [stream for stream in self._streams.values() if not stream.ready]
        while missing:
            remaining_ns = max(until_ns - self._clock.now_ns(), 0)
            if len(missing) < len(self._streams) and all(stream.late for stream in missing):
                remaining_ns = 0
            selected = self._selector.select(remaining_ns / 1e9)
            for key, _ in selected:
                self._receive(key.data)
            missing = [stream for stream in missing if not stream.ready]
            if not selected or not remaining_ns:
                break
        for stream in missing:
            stream.late = True
        if self._clock.now_ns() - self._last_data_ns > SILENCE_MS * 1_000_000:
            self._server.well("no data")
            self._last_data_ns = self._clock.now_ns()

    def _receive(self, stream: Stream) -> None:
        self._last_data_ns = self._clock.now_ns()
        try:
            stream.http.read()
        except ResourceError as error:
            raise self._server.failure(error) from None
        if stream.http.status not in (0, 200):
            if stream.http.ended:
                self._reject(stream, quoted(stream.http.wait()))
            return
        for data in stream.http.events():
            stream.started = True
            self._caches.attempt_started(stream.row.attempt)
            chunk = wire.read_chunk(data)
            if chunk.error is not None:
                self._fail(stream, chunk.error.message)
            for choice in chunk.choices:
                tokens = wire.tokens_of(choice, stream.row.request.params)
                self._check_marks(stream.row, tokens)
                stream.tokens += tokens
                stream.reason = choice.finish_reason or stream.reason
            if chunk.usage is not None:
                self._count(chunk.usage)
                stream.finish = stream.reason
        if stream.http.ended:
            stream.finish = stream.finish or stream.reason
            if not stream.finish:
                self._fail(stream, "the stream ended without a reason")
        if stream.finish:
            self._close(stream.http)

    def _count(self, usage: wire.Usage) -> None:
        """Count prompt tokens; vLLM reports none for aborted requests."""
        cached = usage.prompt_tokens_details.cached_tokens
        self._reused += cached
        self._computed += usage.prompt_tokens - cached

    def _advance(self, stream: Stream) -> StopReason | None:
        stream.late, reason = False, None
        if stream.tokens:
            token, row = stream.tokens.popleft(), stream.row
            if not row.tokens:
                row.first_ns = self._clock.wall_ns()
            reason = row.append(token.token, token.logprob, token.sampler_logprob)
            row.cached = row.length - 1
        if reason is None and not stream.tokens and stream.finish:
            reason = REASONS.get(stream.finish, "error")
        return reason

    def _ask_routes(self, rows: Iterable[VllmRequest]) -> None:
        asked = [row for row in rows if row.request.params.routes and len(row.tokens) > row.sent]
        if not asked and len(self._ended_attempts) < ENDED_ATTEMPTS_MAX:
            return
        parts = [
            wire.KeptPart(attempt=row.attempt, start=row.routes_from(row.sent), end=row.length)
            for row in asked
        ]
        routed = self._server.experts(parts, self._ended_attempts)
        self._ended_attempts.clear()
        for row, routes in zip(asked, routed, strict=True):
            row.routes.add(routes, row.length)

    def _emit(self, row: VllmRequest) -> TokensSampled | None:
        self._ask_routes([row])
        return row.emit()

    def _check_marks(self, row: VllmRequest, tokens: Iterable[wire.Token]) -> None:
        mark = wire.policy_mark(self._weights, row.adapter)
        other = next((token.mark for token in tokens if token.mark != mark), mark)
        if other != mark and not self.stock:
            raise InvariantBroken(
                f"{row.request.request}: vLLM sampled from other weights or another adapter: mark"
                f" {other}, expected {mark} ({self._label}, adapter {row.adapter})",
                hint=SHARED,
            )

    def _reject(self, stream: Stream, message: str) -> None:
        """Raise InvariantBroken for a lost adapter, else fail the request."""
        if stream.http.status == NOT_FOUND and stream.row.adapter:
            raise InvariantBroken(f"vLLM's server lost an adapter: {message}", hint=SHARED)
        self._fail(stream, f"{stream.http.status}: {message}")

    def _fail(self, stream: Stream, message: str) -> None:
        self._server.well(message)
        stream.finish, stream.error = "error", message

    def _resume(self, row: VllmRequest) -> None:
        if not self._rows:
            self._last_data_ns = self._clock.now_ns()
        self._attempts += 1
        row.attempt, row.cached = f"{self._prefix}-{self._attempts}", 0
        version = self._versions.of(row.request)
        row.adapter, row.weights = version.number, version.digest
        salt, kv = self._salt(version.name), ""
        if row.kv is not None:
            salt = row.attempt  # never share an imported cache
            kv, row.kv = self._caches.offer(row.attempt, row.kv), None
        self._hash_blocks(row, salt)
        body = wire.generate_body(
            row.attempt,
            row.sequence,
            row.request.params,
            seed=row.request.seed,
            max_tokens=self._tokens_left(row),
            salt=salt,
            adapter=version.name,
            skip_prefix_cache=row.unrouted,
            kv=kv,
        )
        stream = Stream(row=row, http=self._server.generate(body))
        self._streams[row.request.request] = stream
        self._selector.register(stream.http, selectors.EVENT_READ, stream)

    def _interrupt(self, row: VllmRequest) -> None:
        stream = self._streams.pop(row.request.request, None)
        if stream is not None:
            self._close(stream.http)
        self._end_attempt(row)

    def _kv_array(self, tokens: int) -> tuple[str, tuple[int, ...]]:
        facts = self._caches.facts
        return facts.dtype, facts.shape(tokens)

    def _release(self, row: VllmRequest) -> None:
        self._server.abort([self._free_slot(row)])

    def _free_slot(self, row: VllmRequest) -> str:
        """Free the row's slot; return its attempt."""
        stream = self._streams.pop(row.request.request, None)
        if stream is not None:  # None: the server failed on restart
            self._end_stream(stream)
        del self._rows[row.request.request]
        self._end_attempt(row)
        return row.attempt

    def _end_attempt(self, row: VllmRequest) -> None:
        self._caches.attempt_ended(row.attempt)
        if row.request.params.routes:
            self._ended_attempts.append(row.attempt)

    def _end_stream(self, stream: Stream) -> None:
        if self._versions.adapters and not stream.started and stream.http.fileno() >= 0:
            self._selector.unregister(stream.http)
            self._versions.keep(stream.row.attempt, stream.row.adapter, stream.http)
        else:
            self._close(stream.http)

    def _close(self, http: HttpStream) -> None:
        if http.fileno() >= 0:
            self._selector.unregister(http)
            http.close()

    def _read(self, weights: Path, version: int, digest: str) -> None:
        self._server.read(weights, version=version, digest=digest)

    def _replace(self, held: None, version: int, digest: str) -> None:
        label, self._label = f"{version}:{digest[:16]}", ""
        # A failure leaves an empty label: requests are rejected.
        if self._asleep:
            self._server.wake(WEIGHTS_TAG)
        self._server.replace(digest, label)
        if self._asleep:  # weights first: a GPU need not hold KV caches and load buffers at once
            self._server.wake(KV_TAG)
        self._label, self._weights, self._asleep = label, digest, False

    def _release_memory(self) -> None:
        if SLEEP not in self.declares:
            super()._release_memory()
        self._label = ""
        if self.device != "cpu":
            self._server.sleep()
            self._asleep = True

    def _salt(self, adapter: str) -> str:
        return f"{self._label}+{adapter}" if adapter else self._label

    def _has_weights(self) -> bool:
        return bool(self._label)

    def _hash_blocks(self, row: VllmRequest, salt: str) -> None:
        size, digest = self._block, hash(salt)
        ids, row.blocks = row.sequence, []
        if self._prefix_cache and not row.unrouted:
            for end in range(size, len(ids), size):  # vLLM always computes the last token.
                digest = hash((digest, *ids[end - size : end]))
                row.blocks.append(digest)

    def _tokens_left(self, row: VllmRequest) -> int:
        remaining = row.request.params.max_tokens - row.sampled
        return min(remaining, self.context_tokens - row.length)

    def _warm_up(self) -> None:
        """Run vLLM's first steps, which take seconds, before the worker has a lease to renew."""
        if self.context_tokens == 1:
            return
        self._label = "warm-up"
        warm = SamplingParams(max_tokens=2, temperature=0.7)
        with self._versions.without():
            self.add(EngineRequest(request="warm", token_ids=[0], sampled=0, seed=0, params=warm))
            while self._rows:
                self.step()
        self._label = ""
