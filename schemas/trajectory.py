"""A trajectory: its fields, what must hold between them, and what its headers say.

The bytes are made in `trajectory_codec`. `Trajectory` is what the worker knows when it publishes
and what a reader gets back; both ends call `check`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from dora_pipe.errors import SchemaError
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.identity import Purpose

SegmentKind = Literal["prompt", "model", "tool", "environment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Tokens [start, end) of a trajectory that came from one source in one go.

    Example: ``Segment(kind="model", start=5, end=31, turn=0, worker="w0", epoch=7, version=3,
    start_ns=..., end_ns=...)``. Segments tile the sequence.
    """

    kind: SegmentKind
    start: int
    end: int
    turn: int
    start_ns: int
    end_ns: int
    worker: str = ""
    """Empty for what no worker's engine made."""
    epoch: int = -1
    version: int = -1
    tool: str = ""
    ok: bool = True


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """When things happened to a trajectory: wall clock, ns since 1970; None when they did not."""

    placed: int
    started: int | None = None
    first_token: int | None = None
    finished: int | None = None
    rewarded: int | None = None


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """The JSON column: everything that is neither an array nor asked for in bulk."""

    run: str
    schema_version: int
    group: str
    group_size: int
    sibling: int
    attempt: int
    purpose: Purpose
    deadline: int
    dataset_digest: str
    index: int
    data_epoch: int
    seed: int
    """The trajectory's own seed."""
    prompt_tokens: int
    worker: str
    epoch: int
    finish: FinishReason
    times: Times
    reward_raw: float | None = None
    reward_parts: dict[str, float] = {}
    reward_error: str | None = None
    """Why there is no valid reward; None when there is one."""
    error: str | None = None
    """Class and message of what ended the trajectory with finish "error"."""
    prefills: tuple[int, ...] = ()
    """Sequence lengths at which the KV cache was filled by prefill; the first is the prompt's."""
    moves: int = 0
    extra: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sibling's record.

    Arrays have one entry per token of the sequence, prompt first. `logprobs` are the model's own
    (log-softmax of its logits); `sampler_logprobs` are of the distribution that was sampled from
    (temperature, top-k, top-p, min-p applied). Both are None exactly where `loss_mask` is 0.
    """

    trajectory: str
    version: int
    digest: str
    """Weights digest (hex, 64 digits)."""
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    sampler_logprobs: Sequence[float | None]
    loss_mask: Sequence[int]
    """1 where the policy sampled the token."""
    reward: float | None
    """None exactly when `meta.reward_error` says why."""
    segments: Sequence[Segment]
    meta: Meta

    @property
    def valid(self) -> bool:
        """Whether the reward counts."""
        return self.reward is not None

    @property
    def sampled(self) -> int:
        """Tokens the policy sampled."""
        return sum(self.loss_mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Headers:
    """What a reader may filter by without opening the value; ASCII on the wire."""

    run: str
    group: str
    trajectory: str
    attempt: int
    version: int
    deadline: int
    digest: str
    worker: str
    epoch: int
    tokens: int
    """Length of the sequence."""
    sampled: int
    reward: float | None
    schema_version: int
    sha256: str
    """Of the value bytes as stored."""
    traceparent: str = field(default="")


def check(trajectory: Trajectory) -> None:
    """Raise SchemaError unless everything that must hold inside a trajectory holds."""
    _check_arrays(trajectory)
    _check_segments(trajectory)
    meta = trajectory.meta
    if (trajectory.reward is None) != (meta.reward_error is not None):
        raise SchemaError("exactly one of reward and reward_error must be there", path="$.reward")
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise SchemaError("reward is not finite", path="$.reward")
    if len(trajectory.digest) != 64 or trajectory.version < 0:
        raise SchemaError("weights digest or version is not one", path="$.digest")
    if not 0 <= meta.prompt_tokens <= len(trajectory.token_ids):
        raise SchemaError("prompt is longer than the sequence", path="$.meta.prompt_tokens")


def _check_arrays(trajectory: Trajectory) -> None:
    size = len(trajectory.token_ids)
    arrays = {
        "logprobs": trajectory.logprobs,
        "sampler_logprobs": trajectory.sampler_logprobs,
        "loss_mask": trajectory.loss_mask,
    }
    for name, values in arrays.items():
        if len(values) != size:
            raise SchemaError(f"{len(values)} entries for {size} tokens", path=f"$.{name}")
    if any(mask not in (0, 1) for mask in trajectory.loss_mask):
        raise SchemaError("mask is neither 0 nor 1", path="$.loss_mask")
    for name in ("logprobs", "sampler_logprobs"):
        for place, (value, mask) in enumerate(
            zip(arrays[name], trajectory.loss_mask, strict=True)
        ):
            if (value is None) != (mask == 0):
                raise SchemaError("log-prob and mask disagree", path=f"$.{name}[{place}]")
            if value is not None and not (math.isfinite(value) and value <= 0.0):
                raise SchemaError(f"log-prob {value} is not <= 0", path=f"$.{name}[{place}]")


def _check_segments(trajectory: Trajectory) -> None:
    at = 0
    for place, segment in enumerate(trajectory.segments):
        if segment.start != at or segment.end < segment.start:
            raise SchemaError("segments do not tile the sequence", path=f"$.segments[{place}]")
        sampled = trajectory.loss_mask[segment.start : segment.end]
        if any(mask != (segment.kind == "model") for mask in sampled):
            raise SchemaError("mask and segment disagree", path=f"$.segments[{place}]")
        at = segment.end
    if at != len(trajectory.token_ids):
        raise SchemaError("segments do not reach the end", path="$.segments")
