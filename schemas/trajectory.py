"""Fields and invariants of trajectories and progress records.

`Trajectory` is used by writers and readers; both check it. `trajectory_codec` encodes it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.contexts import Call, Context, lengths
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.identity import Purpose, group_of, parse_trajectory_id, source_of
from dora_pipe.schemas.routes import Routes

_DIGEST = re.compile("[0-9a-f]{64}")

SegmentKind = Literal["prompt", "model", "tool", "environment"]


class Segment(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, end) of a trajectory from one source.

    Example: ``Segment(kind="model", start=5, end=31, turn=0, worker="w0", incarnation=7, version=3,
    start_ns=..., end_ns=...)``. Segments tile the sequence.
    """

    kind: SegmentKind
    start: int
    end: int
    turn: int
    start_ns: int
    end_ns: int
    worker: str = ""
    """Empty unless a worker's engine made it."""
    incarnation: int = -1
    version: int = -1
    tool: str = ""
    ok: bool = True


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a trajectory's events, Unix ns; None if they did not happen."""

    scheduled: int
    started: int | None = None
    first_token: int | None = None
    finished: int | None = None
    rewarded: int | None = None


class Sampler(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Version that sampled tokens."""

    version: int
    digest: str


class Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """JSON column: fields that are neither arrays nor queried in bulk."""

    run: str
    schema_version: int
    group: str
    group_size: int
    sample: int
    attempt: int
    purpose: Purpose
    deadline: int
    dataset_digest: str
    index: int
    data_epoch: int
    seed: int
    """Seed of the trajectory."""
    prompt_tokens: int
    worker: str
    incarnation: int
    finish: FinishReason
    times: Times
    reward_raw: float | None = None
    reward_parts: dict[str, float] = {}
    reward_error: str | None = None
    """Reason for an invalid reward; None if valid."""
    error: str | None = None
    """Class and message of the error, with finish `error`."""
    prefills: tuple[int, ...] = ()
    """Sequence lengths of KV cache prefills.

    Includes bitwise equal entries of a prefix cache; the first is the prompt's.
    """
    migrations: int = 0
    weights: tuple[Sampler, ...] = ()
    """Other versions that sampled tokens, in order; only in runs that may mix versions."""
    task: str = ""
    evaluation: str = ""
    reward_answer: str = ""
    """Answer that the reward read; equal answers are one vote."""
    rewarded_by: Literal["task", "agent"] = "task"
    """Source of the reward; one given by an agent cannot be recomputed."""
    agent_answer: str | None = None
    """Agent's answer that the task scored; None: it scored the model's last output."""
    contexts: tuple[Context, ...] = ()
    """Contexts after the first."""
    calls: tuple[Call, ...] = ()
    """Agent's calls to the model, in the order of their answers."""
    extra: dict[str, Any] = {}

    @property
    def source(self) -> str:
        return source_of(self.purpose, self.evaluation if self.purpose == "eval" else self.task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Trajectory of a group. Arrays have one entry per token, prompt first.

    Writers may pass lists, tuples or arrays (NaN for None); readers get lists or numpy arrays
    (`view_trajectory`).
    """

    trajectory: str
    version: int
    digest: str
    token_ids: Sequence[int]
    """Token ids as sampled, never tokenized again."""
    logprobs: Sequence[float | None]
    """Log-probs of the trained policy: log-softmax of logits / `sampling.temperature`, or of the
    logits at temperature 0 (greedy); None exactly where `loss_mask` is 0."""
    sampler_logprobs: Sequence[float | None]
    """Log-probs of the sampling distribution (after top-k, top-p and min-p; 0 if greedy); a None
    column if equal to `logprobs`."""
    loss_mask: Sequence[int]
    """1 for tokens that the policy sampled."""
    reward: float | None
    """None exactly if `meta.reward_error` has a reason."""
    segments: Sequence[Segment]
    meta: Meta
    """Canonical JSON of Meta."""
    routed_experts: Routes | None = None
    """Routed experts of a mixture, with `sampling.return_routed_experts`."""

    @property
    def valid(self) -> bool:
        return self.reward is not None

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def sampled(self) -> int:
        mask = self.loss_mask
        return int(np.count_nonzero(mask)) if isinstance(mask, np.ndarray) else mask.count(1)

    @property
    def versions(self) -> list[int]:
        return [segment.version for segment in self.segments if segment.kind == "model"]


class Versioned(Protocol):
    """Input of `mixing_error`."""

    @property
    def version(self) -> int: ...

    @property
    def versions(self) -> list[int]: ...


class Described(Versioned, Protocol):
    """`Trajectory` without arrays."""

    @property
    def trajectory(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def reward(self) -> float | None: ...

    @property
    def length(self) -> int: ...

    @property
    def sampled(self) -> int: ...

    @property
    def segments(self) -> Sequence[Segment]: ...

    @property
    def meta(self) -> Meta: ...

    @property
    def routed_experts(self) -> Routes | None: ...


class Masked(Described, Protocol):
    """`Described` with the loss mask."""

    @property
    def loss_mask(self) -> Sequence[int]: ...


class Headers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """ASCII headers of a trajectory, for filtering.

    Example: ``parse_headers(record.headers).version == 3``.
    """

    run: str
    group: str
    trajectory: str
    attempt: int
    version: int
    deadline: int
    digest: str
    worker: str
    incarnation: int
    tokens: int
    """Length of the sequence."""
    sampled: int
    """Number of sampled tokens."""
    reward: float | None
    """None without a valid reward."""
    schema_version: int
    sha256: str
    traceparent: str = ""
    """W3C trace context; empty without tracing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Arrays for `check_arrays`, with NaN for None."""

    token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]  # float32
    sampler_logprobs: np.ndarray[Any, Any]  # float32
    loss_mask: np.ndarray[Any, Any]


def check_arrays(arrays: Arrays) -> None:
    """Raises SchemaError unless the arrays are consistent."""
    size = len(arrays.token_ids)
    mask = arrays.loss_mask
    named = [("logprobs", arrays.logprobs)]
    if arrays.sampler_logprobs is not arrays.logprobs:
        named.append(("sampler_logprobs", arrays.sampler_logprobs))
    for name, values in (("loss_mask", mask), *named):
        if len(values) != size:
            raise SchemaError(f"{len(values)} entries for {size} tokens", path=f"$.{name}")
    _refuse(arrays.token_ids < 0, "token_ids", "token id is negative")
    sampled = mask == 1
    _refuse(~(sampled | (mask == 0)), "loss_mask", "mask is neither 0 nor 1")
    for name, values in named:
        _refuse(np.isnan(values) == sampled, name, "log-prob and mask disagree")
        _refuse(~((values <= 0) & (values > -np.inf)) & sampled, name, "log-prob is not <= 0")


def check_fields(trajectory: Described) -> None:
    """Raises SchemaError unless all other fields are consistent."""
    meta = trajectory.meta
    if (trajectory.reward is None) != (meta.reward_error is not None):
        raise SchemaError("exactly one of reward and reward_error must be there", path="$.reward")
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise SchemaError("reward is not finite", path="$.reward")
    check_digest(trajectory.digest)
    if trajectory.version < 0:
        raise SchemaError(f"version {trajectory.version} is none", path="$.version")
    _check_weights(trajectory)
    _check_contexts(meta.contexts, meta.calls, trajectory.segments, trajectory.length)
    if not 0 <= meta.prompt_tokens <= trajectory.length:
        raise SchemaError("prompt is longer than the sequence", path="$.meta.prompt_tokens")
    purpose, _, sample = parse_trajectory_id(trajectory.trajectory)
    if (group_of(trajectory.trajectory), purpose, sample) != (
        meta.group,
        meta.purpose,
        meta.sample,
    ):
        raise SchemaError("trajectory id is not of this group and trajectory", path="$.trajectory")


def _check_contexts(
    contexts: Sequence[Context], calls: Sequence[Call], segments: Sequence[Segment], length: int
) -> None:
    """Raises SchemaError unless contexts match the segments and calls match sampled tokens."""
    prompts = [segment.start for segment in segments if segment.kind == "prompt"]
    if [context.start for context in contexts] != prompts[1:]:
        raise SchemaError("not where its prompts begin", path="$.meta.contexts")
    sizes = lengths(contexts, length)
    for index, context in enumerate(contexts):
        none = context.parent == -1 and context.shared == 0
        if not none and not (
            0 <= context.parent <= index and 0 < context.shared <= sizes[context.parent]
        ):
            raise SchemaError("shares what is not there", path=f"$.meta.contexts[{index}]")
        if not sizes[index + 1]:
            raise SchemaError("is empty", path=f"$.meta.contexts[{index}]")
    sampled = {segment.start for segment in segments if segment.kind == "model"}
    for index, call in enumerate(calls):
        if not 0 <= call.start <= call.end <= length or call.start not in sampled:
            raise SchemaError("not what a model sampled", path=f"$.meta.calls[{index}]")


def mixing_error(trajectory: Versioned, newest: int) -> str:
    """Return why its versions violate the rules of mixing, empty if they do not.

    They must never decrease and end at most at `newest`.
    """
    last = trajectory.version
    for version in trajectory.versions:
        if version < last:
            return f"version {version} samples after version {last}"
        last = version
    return f"version {last} is later than {newest}" if last > newest else ""


def check_digest(digest: str) -> None:
    """Raises SchemaError for an invalid weights digest."""
    if _DIGEST.fullmatch(digest) is None:
        raise SchemaError("weights digest is not 64 hex digits", path="$.digest")


def _check_weights(trajectory: Described) -> None:
    """Check that a mixed trajectory names exactly the weights of its other versions."""
    named = [weight.version for weight in trajectory.meta.weights]
    for weight in trajectory.meta.weights:
        check_digest(weight.digest)
    if not named:  # callers that know the run check whether mixing is allowed
        return
    own = trajectory.version
    other_versions = dict.fromkeys(version for version in trajectory.versions if version != own)
    if named != list(other_versions):
        raise SchemaError("not the versions of its segments", path="$.meta.weights")


def _refuse(wrong: np.ndarray[Any, Any], name: str, why: str) -> None:
    if np.count_nonzero(wrong):  # a third of the time of `any`
        raise SchemaError(why, path=f"$.{name}[{int(wrong.argmax())}]")


def check_segments(segments: Sequence[Segment], mask: np.ndarray[Any, Any]) -> None:
    """Raises SchemaError unless the segments tile the sequence and match the mask."""
    start = 0
    for index, segment in enumerate(segments):
        if segment.start != start or not start <= segment.end <= len(mask):
            raise SchemaError("segments do not tile the sequence", path=f"$.segments[{index}]")
        sampled = int(np.count_nonzero(mask[start : segment.end]))
        if sampled != (segment.end - start if segment.kind == "model" else 0):
            raise SchemaError("mask and segment disagree", path=f"$.segments[{index}]")
        start = segment.end
    if start != len(mask):
        raise SchemaError("segments do not reach the end", path="$.segments")


def turns_of(
    segments: Sequence[Segment], token_ids: Sequence[int]
) -> list[tuple[SegmentKind, list[int]]]:
    """Return every turn except prompts with its token ids, merging segments of a turn."""
    turns: list[tuple[SegmentKind, list[int]]] = []
    last: tuple[SegmentKind, int] | None = None
    for segment in segments:
        if segment.kind == "prompt":  # one per context
            last = None
            continue
        ids = token_ids[segment.start : segment.end]
        if last == (segment.kind, segment.turn):
            turns[-1][1].extend(ids)
        else:
            turns.append((segment.kind, list(ids)))
        last = (segment.kind, segment.turn)
    return turns


def answer_of(trajectory: Trajectory) -> list[int]:
    """Return the model's last output: in the last answered call of an agent, else in the last turn;
    empty if none."""
    if calls := trajectory.meta.calls:
        return list(trajectory.token_ids[calls[-1].start : calls[-1].end])
    turns = turns_of(trajectory.segments, trajectory.token_ids)
    return next((ids for kind, ids in reversed(turns) if kind == "model"), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnProgress:
    """Answered call of an agent: tokens added to a context."""

    trajectory: str
    attempt: int
    version: int
    digest: str
    worker: str
    incarnation: int
    turn: int
    """Number of earlier records in its chain."""
    context: int
    """Number of its context; begins here if no earlier record names it."""
    parent: int
    """`Context.parent` if the context begins here, else -1."""
    shared: int
    """`Context.shared` if the context begins here, else 0."""
    given_ids: Sequence[int]
    """Prompt tokens that were not yet in the context."""
    token_ids: Sequence[int]
    """Sampled tokens."""
    logprobs: Sequence[float]
    sampler_logprobs: Sequence[float]
    prefills: tuple[int, ...]
    """Context lengths of KV cache prefills."""
    previous: int
    """Offset of the previous record in the same partition; -1 for the first."""
    started_ns: int
    """Unix time in ns when the call got its slot."""
    ended_ns: int
    """Unix time in ns of its last token."""
    call: Call
    """Call with indices in the context's full sequence."""
    routed_experts: Routes | None = None
    """Routed experts of `given_ids` and `token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Tokens [start, start + len(token_ids)) of a request, sampled and given, as in its
    trajectory. The first record includes the prompt."""

    trajectory: str
    attempt: int
    version: int
    digest: str
    worker: str
    incarnation: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    sampler_logprobs: Sequence[float | None]
    loss_mask: Sequence[int]
    """1 for tokens that the policy sampled."""
    segments: Sequence[Segment]
    """Indices count from `start`. The last segment is of the model; all of the model's have
    `version`."""
    prefills: tuple[int, ...]
    """Sequence lengths of KV cache prefills."""
    previous: int
    """Offset of the previous record in the same partition; -1 for the first."""
    started_ns: int
    """Unix time in ns of the request's first sampled token."""
    finish: str
    """End of an episode's last turn: `stop` or `length`; empty: unfinished."""
    routed_experts: Routes | None = None
    """Routed experts of these tokens."""
