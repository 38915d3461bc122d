"""An engine without a model, torch or device, for tests and the simulator.

Tokens are hashes of (weights digest, seed, position), so tests detect mixed versions and wrong KV
caches.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from dora_pipe.core.errors import PolicyError
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.engines.base import EngineBase, ResidentVersions, Version
from dora_pipe.producers.engines.engine import (
    BATCH_INVARIANT,
    COUNTER_SAMPLING,
    KV_EXPORT,
    PARTIAL_ROLLOUT,
    PREFILL_EXACT,
    SLEEP,
    EngineEvent,
    EngineRequest,
    Kv,
    StopReason,
)
from dora_pipe.producers.engines.requests import Decode, RunningRequest, stop_text

VOCABULARY = 96
END_TOKEN = 2
"""End of a turn; the hash never draws it."""
LENGTH_MU = 1.2
LENGTH_SIGMA = 1.3
LENGTH_UNITS_MAX = 60
"""Turns have 2 n + 3 tokens, n log-normal(mu, sigma) in 1..60, as in the demo."""

_MASK = (1 << 64) - 1
_GREEDY_SEED = 0

Lengths = Callable[[int, int], int]
"""(seed, turn) -> tokens with the end token; at least 1."""


def mix64(value: int) -> int:
    """Return splitmix64's finalizer (Steele, Lea and Flood 2014), a bijection of 64-bit words."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def long_tailed_length(seed: int, turn: int) -> int:
    """Return a turn's tokens: 5 to 123, median 11."""
    first, second = mix64(mix64(seed) ^ turn), mix64(mix64(seed ^ _MASK) ^ turn)
    radius = math.sqrt(-2 * math.log((first + 1) / 2**64))
    normal = radius * math.cos(2 * math.pi * second / 2**64)
    units = math.ceil(math.exp(LENGTH_MU + LENGTH_SIGMA * normal))
    return 2 * min(max(units, 1), LENGTH_UNITS_MAX) + 3


@dataclass(slots=True, kw_only=True)
class _Row(RunningRequest):
    seed: int
    turn_ends: int
    """Sampled tokens when the turn ends."""
    under: Version
    computed: bool = False
    """The cache is imported or prefilled."""


@lru_cache(maxsize=1024)
def _key(digest: str) -> int:
    return int.from_bytes(hashlib.sha256(digest.encode()).digest()[:8], "big") if digest else 0


def _seed(request: EngineRequest) -> int:
    return _GREEDY_SEED if request.params.temperature == 0 else request.seed


class _Versions(ResidentVersions[Version]):
    def is_whole(self, weights: Path, digest: str) -> bool:
        return not self.adapters

    def of_number(self, version: int) -> Version | None:
        return self._versions.get(version)

    def _made(self, path: Path, version: int, digest: str) -> Version:
        return _policy(version, digest)


def _policy(version: int, digest: str) -> Version:
    if version < 0 or not digest:
        raise PolicyError(f"version {version} with digest {digest!r} is not a policy")
    return Version(digest=digest)


class SimulatedEngine(EngineBase[_Row]):
    """Simulated engine; only stop strings require `decode`, and `load` reads no file."""

    name = "simulated"
    version = "1"
    declares = frozenset(
        {COUNTER_SAMPLING, BATCH_INVARIANT, PREFILL_EXACT, KV_EXPORT, PARTIAL_ROLLOUT, SLEEP}
    )
    device = "none"
    dtype = "none"
    _layout = "simulated-1"
    _versions: _Versions

    def __init__(
        self,
        *,
        slots: int,
        context_tokens: int,
        max_resident_versions: int = 1,
        lengths: Lengths = long_tailed_length,
        decode: Decode | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(
            slots=slots,
            context_tokens=context_tokens,
            versions=_Versions(
                Version, most=max_resident_versions, adapters=max_resident_versions > 1
            ),
            decode=decode,
            clock=clock,
        )
        self._lengths = lengths
        self._asleep = False

    def drop(self, version: int) -> None:
        dropped = self._versions.of_number(version)
        assert all(row.under is not dropped for row in self._rows.values()), "rows run under it"
        super().drop(version)

    def add(self, request: EngineRequest) -> None:
        self._check(request)
        seed = _seed(request)
        self._rows[request.request] = _Row(
            request=request,
            stops=stop_text(request, self._decode),
            seed=seed,
            turn_ends=self._turn_end(seed, request.sampled),
            under=self._versions.of(request),
            computed=request.kv is not None,
        )

    def kv_error(self, request: EngineRequest) -> str | None:
        misfit = super().kv_error(request)
        if misfit is not None or request.kv is None:
            return misfit
        expected = [_seed(request) & _MASK, len(request.token_ids)]
        return None if request.kv.array.tolist() == expected else "another request"

    def step(self) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for row in list(self._rows.values()):
            reason = self._advance(row)
            events += row.events(reason)
            if reason is not None:
                self._release(row)
        return events

    @property
    def kv_used_tokens(self) -> int:
        return sum(row.length for row in self._rows.values())

    def _read(self, weights: Path, version: int, digest: str) -> None:
        _policy(version, digest)

    def _replace(self, held: None, version: int, digest: str) -> None:
        self._asleep = False

    def _release_memory(self) -> None:
        self._asleep = True

    def _has_weights(self) -> bool:
        return not self._asleep

    def _resume(self, row: _Row) -> None:
        row.computed, row.under = False, self._versions.of(row.request)

    def _kv_array(self, tokens: int) -> tuple[str, tuple[int, ...]]:
        return "<u8", (2,)

    def _kv_of(self, row: _Row) -> Kv | None:
        if not row.computed or row.length < 2:
            return None
        return Kv(
            tokens=row.length - 1,
            layout=self._layout,
            weights=row.under.digest,
            array=np.array([row.seed & _MASK, row.length], np.uint64),
        )

    def _turn_end(self, seed: int, sampled: int) -> int:
        end, turn = 0, 0
        while end <= sampled:
            end += max(1, self._lengths(seed, turn))
            turn += 1
        return end

    def _advance(self, row: _Row) -> StopReason | None:
        if not row.tokens:
            row.first_ns = self._clock.wall_ns()
        token, logprob = self._sample(row)
        row.computed = True
        sampler_logprob = logprob if row.request.params.temperature else 0.0
        reason = row.sample(token, logprob, sampler_logprob, self.context_tokens)
        if row.sampled == row.turn_ends:
            row.turn_ends = self._turn_end(row.seed, row.sampled)
        return reason

    def _sample(self, row: _Row) -> tuple[int, float]:
        drawn = mix64(mix64(_key(row.under.digest) ^ row.seed) ^ row.length)
        token = drawn % (VOCABULARY - 1)
        token += token >= END_TOKEN
        if row.sampled + 1 == row.turn_ends:
            token = END_TOKEN
        return token, -math.log(VOCABULARY) * ((drawn >> 32) + 1) / 2**32
