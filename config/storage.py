"""Sections about stored versions and checkpoints."""

from __future__ import annotations

from typing import Literal

from dora_pipe.config.section import FullEvery, NonNegative, PositiveFloat, Section


class Policies(Section, frozen=True, kw_only=True):
    """Storage format of policy versions (docs/sizing.md)."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of published weights or adapters, which workers sample with and digests cover. `auto`:
    bfloat16 if the model's config has it and the trainer supports it. The optimizer updates float32
    weights."""
    full_every: FullEvery | Literal["auto"] = "auto"
    """Every N-th version, and every version with a checkpoint, is stored in full; the others as
    deltas (docs/storage.md). 1: no deltas; auto: 8 for published bfloat16 weights, otherwise
    1."""


class Store(Section, frozen=True, kw_only=True):
    """Storage of policy versions and checkpoints."""

    path: str = ""
    """Directory; empty: `policies` in the run directory."""
    url: str = ""
    """Remote store: `s3://bucket/prefix?endpoint_override=...`, `file:///shared/run` or another
    file system of pyarrow. `path` then holds copies. See docs/storage.md."""
    cache_gb: PositiveFloat = 100.0
    """Size limit of the copies in `path`, with a `url` or deltas."""
    keep_every: NonNegative | Literal["auto"] = "auto"
    """Keep every N-th checkpoint and pinned versions, and delete others; replay rebuilds them. 0
    keeps everything; auto: 10 if versions and checkpoints add a GiB or more per step, otherwise 0.
    Fixed at the start of a run."""
