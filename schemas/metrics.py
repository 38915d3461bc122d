"""Metrics records: the periodic status of each role; lossy, never state by themselves."""

from __future__ import annotations

import msgspec

from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.wire import Unknown, decode_tagged, kebab, kinds_of


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of a role since its imports, by what they were spent on."""

    total_s: float
    bus_s: float
    """Polling and appending."""
    control_s: float
    """Deciding: `react` without the codec."""
    codec_s: float
    """Encoding and decoding trajectories and progress."""
    rss_bytes: int


class Metrics(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab):
    """Base of the metrics records."""

    at_ns: int
    waits_for: str
    """What the role waits for, in words; empty when it works."""
    cost: Cost


class WorkerStatus(Metrics, frozen=True, kw_only=True):
    """What a worker does now."""

    worker: str
    epoch: int
    version: int
    """The version it hosts; -1 before the first."""
    active: int
    waiting: int
    kv_used_tokens: int
    tokens_total: int
    """Tokens sampled by this incarnation."""
    progress: dict[str, Resume]
    """Of every open request that has a progress record."""


class TrainerStatus(Metrics, frozen=True, kw_only=True):
    """What the trainer does now."""

    role_epoch: int
    step: int
    phase: str
    cached_records: int
    cached_bytes: int


class OrchestratorStatus(Metrics, frozen=True, kw_only=True):
    """What the orchestrator does now."""

    role_epoch: int
    version: int
    open_groups: int
    queued_requests: int


AnyMetrics = WorkerStatus | TrainerStatus | OrchestratorStatus

_DECODER = msgspec.json.Decoder(AnyMetrics)
KINDS = kinds_of(WorkerStatus, TrainerStatus, OrchestratorStatus)


def decode_metrics(data: bytes) -> AnyMetrics | Unknown:
    """A metrics record; `Unknown` for a kind of a later version. Raises SchemaError."""
    return decode_tagged(data, _DECODER, KINDS)
