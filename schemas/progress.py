"""A progress record: the tokens of a running request since its last one, so that a crash loses few.

Only single-turn requests have them; a multi-turn request starts again under the same version and
seed. The bytes are made in `trajectory_codec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Sampled tokens [start, start + len(token_ids)) of one request, counted after its prompt."""

    trajectory: str
    attempt: int
    version: int
    digest: str
    worker: str
    epoch: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    sampler_logprobs: Sequence[float]
    prefills: tuple[int, ...]
    """Sequence lengths at which the KV cache was filled by prefill so far."""
    previous: int
    """Offset of the record before this one in the same partition; -1 for the first."""
    started_ns: int
    """When the request's first token was sampled: wall clock."""
