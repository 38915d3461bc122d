"""An engine without a model: tokens and lengths are hashes, a step takes no real time.

It keeps every promise it declares, so that the roles and the simulator can be tested with it, and
it needs neither torch nor a device. Its KV cache is what its next token depends on, so that the
cache of another request or another policy is noticed. The tokens are a function of (weights digest,
seed, position): a trajectory that was mixed from two policy versions does not equal one of either.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.port import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    INTERRUPTIBLE,
    KV_EXPORT,
    PREFILL_EXACT,
    EngineEvent,
    EngineRequest,
    Exported,
    Kv,
    RequestFinished,
    StopReason,
    TokensSampled,
    WeightsLoaded,
)
from dora_pipe.producers.engines.requests import check_request, kv_mismatch, stop_text
from dora_pipe.producers.engines.stops import Decode, StopText

VOCABULARY = 96
"""Token ids are in range(VOCABULARY), like those of the arithmetic demo."""
END_TOKEN = 2
"""Ends a turn; the hash never draws it."""
LENGTH_MU = 1.2
LENGTH_SIGMA = 1.3
LENGTH_UNITS_MAX = 60
"""Turn lengths in tokens are 2 n + 3, n log-normal(mu, sigma) within 1..60: the demo's."""

LAYOUT = "simulated-1"
KV_ARRAY = "state"
"""The one array of an exported cache: uint64 [2], seed and position."""

_MASK = (1 << 64) - 1
_GREEDY_SEED = 0

Lengths = Callable[[int, int], int]
"""(seed, turn) -> sampled tokens of that turn, its end token included; at least 1."""


def mix64(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection of 64-bit integers."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def long_tailed_length(seed: int, turn: int) -> int:
    """Tokens of a turn: 5 to 123, median 11, a tail as in the demo; a function of (seed, turn)."""
    first, second = mix64(mix64(seed) ^ turn), mix64(mix64(seed ^ _MASK) ^ turn)
    radius = math.sqrt(-2 * math.log((first + 1) / 2**64))
    normal = radius * math.cos(2 * math.pi * second / 2**64)
    units = math.ceil(math.exp(LENGTH_MU + LENGTH_SIGMA * normal))
    return 2 * min(max(units, 1), LENGTH_UNITS_MAX) + 3


@dataclass(slots=True)
class _Row:
    """A request in its slot; `position` is the index of the next token in the sequence."""

    request: EngineRequest
    seed: int
    position: int
    sampled: int
    turn_ends: int
    """The count of sampled tokens at which the end token comes."""
    stops: StopText | None
    version: int
    computed: bool = False
    """Its cache is complete: it came with one, or a step has prefilled it."""
    first_token_ns: int = 0
    new_tokens: list[int] = field(default_factory=list)
    new_logprobs: list[float] = field(default_factory=list)


@lru_cache(maxsize=1024)
def _key(digest: str) -> int:
    """What a policy's tokens depend on; 0 before there is one."""
    return int.from_bytes(hashlib.sha256(digest.encode()).digest()[:8], "big") if digest else 0


def _seed(request: EngineRequest) -> int:
    return _GREEDY_SEED if request.params.temperature == 0 else request.seed


class SimulatedEngine:
    """See the module. `now_ns` gives the wall clock for `first_token_ns` (the simulator's own).

    `decode` is needed for stop strings only. `load` reads no file.

    Example: ``SimulatedEngine(slots=8, context_tokens=256)``
    """

    name = "simulated"
    version = "1"
    declares = frozenset(
        {COUNTER_SAMPLING, BATCH_INVARIANT, PREFILL_EXACT, KV_EXPORT, INTERRUPTIBLE}
    )
    device = "none"
    dtype = "none"

    def __init__(
        self,
        *,
        slots: int,
        context_tokens: int,
        versions_resident: int = 1,
        lengths: Lengths = long_tailed_length,
        decode: Decode | None = None,
        now_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self.slots = slots
        self.context_tokens = context_tokens
        self._lengths = lengths
        self._decode = decode
        self._now_ns = now_ns
        self.versions_resident = versions_resident
        self._latest = -1
        self._digests: dict[int, str] = {}
        """Of the resident versions."""
        self._rows: dict[str, _Row] = {}

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        """Take `digest` for the weights; the file is not read. Raises as the port says."""
        if self._rows and self.versions_resident == 1:
            raise ValueError(f"{len(self._rows)} rows are active; weights change between requests")
        return self._load(version, digest)

    def drop(self, version: int) -> None:
        """See the port."""
        assert version not in {row.version for row in self._rows.values()}, "rows run under it"
        if self.versions_resident > 1:
            self._digests.pop(version, None)

    def reload_keeping(self, weights: Path, *, version: int, digest: str) -> list[EngineEvent]:
        """See the port; the file is not read."""
        loaded = self._load(version, digest)
        pending = [self._emit(row) for row in self._rows.values() if row.new_tokens]
        for row in self._rows.values():
            row.computed, row.version = False, version
        return [*pending, loaded]

    def _load(self, version: int, digest: str) -> WeightsLoaded:
        if version < 0 or not digest:
            raise PolicyError(f"version {version} with digest {digest!r} is no policy")
        if self.versions_resident == 1:
            self._digests.clear()
        elif version not in self._digests and len(self._digests) >= self.versions_resident:
            raise ValueError(f"{self.versions_resident} versions are resident; drop one first")
        self._digests[version], self._latest = digest, version
        return WeightsLoaded(version=version, digest=digest, load_ms=0.0)

    def add(self, request: EngineRequest) -> None:
        """See the port."""
        check_request(
            request, running=self._rows, slots=self.slots, context_tokens=self.context_tokens
        )
        version = self._version_of(request)
        misfit = self.kv_error(request)
        if misfit is not None:
            raise ValueError(f"{request.request}: its KV cache is of {misfit}")
        seed = _seed(request)
        self._rows[request.request] = _Row(
            request=request,
            seed=seed,
            position=len(request.token_ids),
            sampled=request.sampled,
            turn_ends=self._turn_end(seed, request.sampled),
            stops=stop_text(request, self._decode),
            version=version,
            computed=request.kv is not None,
        )

    def kv_error(self, request: EngineRequest) -> str | None:
        """See the port."""
        kv = request.kv
        if kv is None:
            return None
        weights = self._digests.get(self._wanted(request), "")
        misfit = kv_mismatch(request, kv, layout=LAYOUT, weights=weights)
        if misfit is not None:
            return misfit
        if set(kv.arrays) != {KV_ARRAY}:
            return "other arrays"
        array = kv.arrays[KV_ARRAY]
        if array.dtype != np.uint64:
            return "another type"
        if array.shape != (2,):
            return "another shape"
        wanted = [_seed(request) & _MASK, len(request.token_ids)]
        return None if array.tolist() == wanted else "another request"

    def export(self, request: str) -> Exported | None:
        """See the port."""
        row = self._rows.pop(request, None)
        if row is None:
            return None
        state = np.array([row.seed & _MASK, row.position], np.uint64)
        weights = self._digests.get(row.version, "")
        kv = Kv(tokens=row.position - 1, layout=LAYOUT, weights=weights, arrays={KV_ARRAY: state})
        complete = row.computed and kv.tokens > 0
        return Exported(
            sampled=self._emit(row) if row.new_tokens else None, kv=kv if complete else None
        )

    def cancel(self, request: str) -> None:
        """See the port."""
        self._rows.pop(request, None)

    def step(self) -> list[EngineEvent]:
        """See the port; events come in the order in which the requests were added."""
        events: list[EngineEvent] = []
        for name, row in list(self._rows.items()):
            reason = self._advance(row)
            every = row.request.emit_every
            if reason is not None or (every and len(row.new_tokens) >= every):
                events.append(self._emit(row))
            if reason is not None:
                events.append(RequestFinished(request=name, reason=reason))
                del self._rows[name]
        return events

    @property
    def kv_tokens(self) -> int:
        """See the port."""
        return self.slots * self.context_tokens

    @property
    def active(self) -> int:
        """See the port."""
        return len(self._rows)

    @property
    def kv_used_tokens(self) -> int:
        """See the port: what a real engine would hold."""
        return sum(row.position for row in self._rows.values())

    def close(self) -> None:
        """Forget every row."""
        self._rows.clear()

    def _wanted(self, request: EngineRequest) -> int:
        alone = self.versions_resident == 1 or request.version < 0
        return self._latest if alone else request.version

    def _version_of(self, request: EngineRequest) -> int:
        """Raises ValueError where the wanted version is one of several and is not there."""
        version = self._wanted(request)
        if self.versions_resident > 1 and version not in self._digests:
            raise ValueError(f"{request.request}: version {version} is not resident")
        return version

    def _turn_end(self, seed: int, sampled: int) -> int:
        """The end of the turn that the token after `sampled` ones belongs to."""
        end, turn = 0, 0
        while end <= sampled:
            end += max(1, self._lengths(seed, turn))
            turn += 1
        return end

    def _advance(self, row: _Row) -> StopReason | None:
        """Sample one token; why the request ends with it, or None."""
        request, params = row.request, row.request.params
        token, logprob = self._sample(row)
        if not row.new_tokens and row.position == len(request.token_ids):
            row.first_token_ns = self._now_ns()
        row.new_tokens.append(token)
        row.new_logprobs.append(logprob)
        row.position += 1
        row.computed = True
        row.sampled += 1
        if row.sampled == row.turn_ends:
            row.turn_ends = self._turn_end(row.seed, row.sampled)
        if token in params.stop_ids or (row.stops is not None and row.stops.feed(token)):
            return "stop"
        full = row.position >= self.context_tokens
        return "length" if full or row.sampled >= params.max_tokens else None

    def _sample(self, row: _Row) -> tuple[int, float]:
        """Token and log-prob, functions of (digest, seed, position)."""
        drawn = mix64(mix64(_key(self._digests.get(row.version, "")) ^ row.seed) ^ row.position)
        token = drawn % (VOCABULARY - 1)
        token += token >= END_TOKEN
        if row.sampled + 1 == row.turn_ends:
            token = END_TOKEN
        return token, -math.log(VOCABULARY) * ((drawn >> 32) + 1) / 2**32

    def _emit(self, row: _Row) -> TokensSampled:
        tokens, logprobs = row.new_tokens, row.new_logprobs
        row.new_tokens, row.new_logprobs = [], []
        plain = row.request.params.temperature != 0
        return TokensSampled(
            request=row.request.request,
            token_ids=tokens,
            logprobs=logprobs,
            sampler_logprobs=logprobs if plain else [0.0] * len(tokens),
            first_token_ns=row.first_token_ns,
        )
