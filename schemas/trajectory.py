"""A trajectory and the progress record of a running one: fields, and what must hold between them.

The bytes are made in `trajectory_codec`, the headers in `headers`. `Trajectory` is what the worker
knows when it publishes and what a reader gets back; both ends check it.
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
from dora_pipe.schemas.contexts import Call, Context, check_contexts
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.identity import Purpose, group_of, parse_trajectory_id, source_of
from dora_pipe.schemas.routes import Routes

_DIGEST = re.compile("[0-9a-f]{64}")

SegmentKind = Literal["prompt", "model", "tool", "environment"]


class Segment(msgspec.Struct, frozen=True, gc=False):
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


class Sampler(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A version that sampled tokens."""

    version: int
    digest: str
    """Weights digest (hex)."""


class Meta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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
    """Sequence lengths at which the KV cache was filled by prefill, or by keys of equal beginnings
    with the very bits of one; the first is the prompt's."""
    moves: int = 0
    weights: tuple[Sampler, ...] = ()
    """Every version beside the trajectory's own that sampled tokens of it, in order; only in runs
    that may mix versions."""
    task: str = ""
    """As its group's dispatch has it."""
    evaluation: str = ""
    """As its group's dispatch has it."""
    reward_answer: str = ""
    """What the reward read as the answer: equal ones are one vote. Empty where none said one."""
    rewarded_by: Literal["task", "agent"] = "task"
    """Whose its reward is: an agent may give its own, which nobody can ask for again."""
    agent_answer: str | None = None
    """The text that an agent gave as its answer, which the task has scored; None: the task has
    scored what the model said last."""
    contexts: tuple[Context, ...] = ()
    """Those behind the first; see `schemas.contexts`."""
    calls: tuple[Call, ...] = ()
    """Of an agent to the model, in the order in which they were answered; none where an environment
    or nobody answered the model."""
    extra: dict[str, Any] = {}

    @property
    def source(self) -> str:
        """As `GroupSpec.source`."""
        return source_of(self.purpose, self.evaluation if self.purpose == "eval" else self.task)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One sibling's record.

    Arrays have one entry per token of the sequence, prompt first; a writer may give lists, tuples
    or arrays of numbers (NaN is None there), a reader gets lists, or numpy's (`view_trajectory`).
    `logprobs` are of the policy that is trained: log-softmax of logits / `sampling.temperature`, or
    of the logits themselves where that is 0 (greedy). `sampler_logprobs` are of the distribution
    that was sampled from (top-k, top-p and min-p applied, too; 0 if greedy). Both are None exactly
    where `loss_mask` is 0.
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
    routed_experts: Routes | None = None
    """Of a mixture's tokens, where `sampling.routes` asks for it; see `schemas.routes`."""

    @property
    def valid(self) -> bool:
        """Whether the reward counts."""
        return self.reward is not None

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.token_ids)

    @property
    def sampled(self) -> int:
        """Tokens the policy sampled."""
        mask = self.loss_mask
        return int(np.count_nonzero(mask)) if isinstance(mask, np.ndarray) else mask.count(1)

    @property
    def versions(self) -> list[int]:
        """The version of every segment that the policy sampled, in order."""
        return [one.version for one in self.segments if one.kind == "model"]


class Versioned(Protocol):
    """What `mixing_error` looks at."""

    @property
    def version(self) -> int: ...

    @property
    def versions(self) -> list[int]:
        """The version of every segment that the policy sampled, in order."""
        ...


class Described(Versioned, Protocol):
    """What a trajectory says beside its arrays, as `Trajectory` has it."""

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
    """The same with what says which tokens were sampled."""

    @property
    def loss_mask(self) -> Sequence[int]: ...


class Headers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a reader may filter by without opening the value; ASCII on the wire (see `headers`).

    Example: ``parse_headers(record.headers).version == 3``.
    """

    run: str
    group: str
    trajectory: str
    attempt: int
    version: int
    deadline: int
    """Last step that may train it; -1 for evaluation."""
    digest: str
    """Weights digest (hex)."""
    worker: str
    epoch: int
    """The worker's incarnation."""
    tokens: int
    """Length of the sequence."""
    sampled: int
    """How many of them the policy sampled."""
    reward: float | None
    """None when the trajectory has no valid reward."""
    schema_version: int
    sha256: str
    """Of the value bytes as stored (hex); of a large value another digest, which says so
    (`value_digest`)."""
    traceparent: str = ""
    """W3C trace context; empty where nothing is traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """The arrays of a trajectory as `check_arrays` looks at them; None has become NaN."""

    token_ids: np.ndarray[Any, Any]
    logprobs: np.ndarray[Any, Any]  # float32
    sampler_logprobs: np.ndarray[Any, Any]  # float32
    loss_mask: np.ndarray[Any, Any]


def check_arrays(arrays: Arrays) -> None:
    """Raise SchemaError unless the arrays fit each other."""
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
    """Raise SchemaError unless everything beside arrays and segments fits them and each other."""
    meta = trajectory.meta
    if (trajectory.reward is None) != (meta.reward_error is not None):
        raise SchemaError("exactly one of reward and reward_error must be there", path="$.reward")
    if trajectory.reward is not None and not math.isfinite(trajectory.reward):
        raise SchemaError("reward is not finite", path="$.reward")
    check_digest(trajectory.digest)
    if trajectory.version < 0:
        raise SchemaError(f"version {trajectory.version} is none", path="$.version")
    _check_weights(trajectory)
    check_contexts(meta.contexts, meta.calls, trajectory.segments, trajectory.length)
    if not 0 <= meta.prompt_tokens <= trajectory.length:
        raise SchemaError("prompt is longer than the sequence", path="$.meta.prompt_tokens")
    purpose, _, sibling = parse_trajectory_id(trajectory.trajectory)
    if (group_of(trajectory.trajectory), purpose, sibling) != (
        meta.group,
        meta.purpose,
        meta.sibling,
    ):
        raise SchemaError("trajectory id is not of this group and sibling", path="$.trajectory")


def mixing_error(trajectory: Versioned, newest: int) -> str:
    """Why its versions are not those of a run that may mix them; empty if they are.

    From its own on they never decrease, and none is later than `newest`.
    """
    last = trajectory.version
    for version in trajectory.versions:
        if version < last:
            return f"version {version} samples after version {last}"
        last = version
    return f"version {last} is later than {newest}" if last > newest else ""


def check_digest(digest: str) -> None:
    """Raise SchemaError unless this is a weights digest."""
    if _DIGEST.fullmatch(digest) is None:
        raise SchemaError("weights digest is not 64 hex digits", path="$.digest")


def _check_weights(trajectory: Described) -> None:
    """A mixed trajectory names the weights of each of its other versions, and no others."""
    named = [one.version for one in trajectory.meta.weights]
    for one in trajectory.meta.weights:
        check_digest(one.digest)
    if not named:  # that it is mixed then is for those to say who know what the run allows
        return
    own = trajectory.version
    others = dict.fromkeys(version for version in trajectory.versions if version != own)
    if named != list(others):
        raise SchemaError("not the versions of its segments", path="$.meta.weights")


def _refuse(wrong: np.ndarray[Any, Any], name: str, why: str) -> None:
    """Raise SchemaError naming the first place where `wrong` is true."""
    if np.count_nonzero(wrong):  # A third of the time of `any`.
        raise SchemaError(why, path=f"$.{name}[{int(wrong.argmax())}]")


def check_segments(segments: Sequence[Segment], mask: np.ndarray[Any, Any]) -> None:
    """Raise SchemaError unless the segments tile the sequence, and the mask is what they say."""
    at = 0
    for place, segment in enumerate(segments):
        if segment.start != at or not at <= segment.end <= len(mask):
            raise SchemaError("segments do not tile the sequence", path=f"$.segments[{place}]")
        sampled = int(np.count_nonzero(mask[at : segment.end]))
        if sampled != (segment.end - at if segment.kind == "model" else 0):
            raise SchemaError("mask and segment disagree", path=f"$.segments[{place}]")
        at = segment.end
    if at != len(mask):
        raise SchemaError("segments do not reach the end", path="$.segments")


def turns_of(
    segments: Sequence[Segment], token_ids: Sequence[int]
) -> list[tuple[SegmentKind, list[int]]]:
    """Every turn but the prompts, with its token ids; a turn of several segments is one."""
    found: list[tuple[SegmentKind, list[int]]] = []
    last: tuple[SegmentKind, int] | None = None
    for segment in segments:
        if segment.kind == "prompt":  # Of each context.
            last = None
            continue
        ids = token_ids[segment.start : segment.end]
        if last == (segment.kind, segment.turn):
            found[-1][1].extend(ids)
        else:
            found.append((segment.kind, list(ids)))
        last = (segment.kind, segment.turn)
    return found


def answer_of(trajectory: Trajectory) -> list[int]:
    """What the model said last: to an agent in the call that was answered last, else in the last
    turn; empty where it said nothing."""
    if calls := trajectory.meta.calls:
        return list(trajectory.token_ids[calls[-1].start : calls[-1].end])
    turns = turns_of(trajectory.segments, trajectory.token_ids)
    return next((ids for kind, ids in reversed(turns) if kind == "model"), [])


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
    routed_experts: Routes | None = None
    """Of these tokens; of the prompt's before them, too, where `start` is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnProgress:
    """A call of an agent that the model has answered: what it adds to the contexts of its
    trajectory. Written before the agent has its answer."""

    trajectory: str
    attempt: int
    version: int
    digest: str
    worker: str
    epoch: int
    turn: int
    """How many such records stand before it in its chain."""
    context: int
    """Number of the context that it is part of; one that no record before it names begins here."""
    parent: int
    """As `Context.parent`, where the context begins here; else -1."""
    shared: int
    """As `Context.shared`, where the context begins here; else 0."""
    given_ids: Sequence[int]
    """What of its prompt was not in the context before."""
    token_ids: Sequence[int]
    """What was sampled."""
    logprobs: Sequence[float]
    sampler_logprobs: Sequence[float]
    prefills: tuple[int, ...]
    """Lengths of the context's sequence at which a KV cache was filled by prefill for it."""
    previous: int
    """Offset of the record before this one in the same partition; -1 for the first."""
    started_ns: int
    """When the call had its slot: wall clock."""
    ended_ns: int
    """When its last token was there."""
    call: Call
    """Its places are those of the context's whole sequence."""
    routed_experts: Routes | None = None
    """Of `given_ids` and `token_ids`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeProgress:
    """Tokens [start, start + len(token_ids)) of an episode's sequence, as its trajectory will have
    them: what was sampled, and what stood before that. The first record has the prompt."""

    trajectory: str
    attempt: int
    version: int
    digest: str
    worker: str
    epoch: int
    start: int
    token_ids: Sequence[int]
    logprobs: Sequence[float | None]
    sampler_logprobs: Sequence[float | None]
    loss_mask: Sequence[int]
    """1 where the policy sampled the token."""
    segments: Sequence[Segment]
    """Their places are counted from `start`. The last one is of the model, and all of the model's
    are of `version`."""
    prefills: tuple[int, ...]
    """Sequence lengths at which the KV cache was filled by prefill so far."""
    previous: int
    """Offset of the record before this one in the same partition; -1 for the first."""
    started_ns: int
    """When the request's first token was sampled: wall clock."""
    finish: str
    """How the turn that it ends with has ended: `stop` or `length`; empty: it goes on."""
    routed_experts: Routes | None = None
    """Of these tokens."""
