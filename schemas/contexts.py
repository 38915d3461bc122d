"""Contexts of a trajectory: the token sequences of an agent's calls.

The first context is the record's sequence. A call whose prompt does not extend it (compaction,
sub-agent, rewritten history, second answer to one prompt) opens another context. A context names
the earlier one whose beginning it shares, so tokens are stored once::

    record    [ prompt model environment model | prompt model | prompt model ]
    contexts    0                                1              2: 9 tokens of 0, and these

Tokens sampled in another context count as given: each sampled token is trained once, in its own
context.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.identity import call_seed
from dora_pipe.schemas.routes import Choices
from dora_pipe.schemas.wire import sha256_hex

if TYPE_CHECKING:
    from dora_pipe.schemas.trajectory import Masked, Segment, Trajectory


class Context(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Context after the first.

    Example: ``Context(start=40, parent=0, shared=12)``: the first 12 tokens of context 0, then the
    record's tokens from 40 to the start of the next context.
    """

    start: int
    """First own token in the record, where a segment of kind "prompt" begins."""
    parent: int = -1
    """Number of the earlier context that it extends; -1: none."""
    shared: int = 0
    """Tokens of the parent's sequence before its own."""


class Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Agent's call to the model, which sampled tokens [start, end) of the record.

    Example: ``Call(start=9, end=31, seed=77, asked_ns=..., answered_ns=..., api="chat")``.
    """

    start: int
    end: int
    seed: int
    occurrence: int = 0
    """Number of earlier calls of the trajectory with the same prompt ids."""
    finish: FinishReason = "stop"
    asked_ns: int
    """Unix time in ns."""
    answered_ns: int
    """When the answer was durable in the log, Unix ns."""
    api: str = ""
    """One of `chat`, `responses`, `messages`, `generate`."""
    caller: str = ""
    """Name given by the agent."""
    ignored_settings: dict[str, Any] = {}
    """Requested sampling settings that the run ignores."""
    stop: tuple[str, ...] = ()
    """Stop strings, in addition to the run's."""
    stop_ids: tuple[int, ...] = ()
    """Stop token ids, in addition to the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTokens:
    """Context as a sequence; arrays have an entry per token, NaN if not sampled."""

    number: int
    own: int
    """Index of its first own token; earlier ones come from the parent and are given."""
    start: int
    """First own token in the record."""
    token_ids: np.ndarray[Any, Any]  # int32
    logprobs: np.ndarray[Any, Any]  # float32
    sampler_logprobs: np.ndarray[Any, Any]  # float32
    loss_mask: np.ndarray[Any, Any]  # uint8


def bounds(contexts: Sequence[Context], length: int) -> list[tuple[int, int]]:
    """Return [start, end) in the record of each context's own tokens, including the first."""
    starts = [0, *(context.start for context in contexts), length]
    return list(pairwise(starts))


def lengths(contexts: Sequence[Context], length: int) -> list[int]:
    """Return the total tokens of each context."""
    shared = [0, *(context.shared for context in contexts)]
    places = zip(shared, bounds(contexts, length), strict=True)
    return [before + end - start for before, (start, end) in places]


def context_at(contexts: Sequence[Context], position: int) -> int:
    """Return the context whose own tokens include this index of the record."""
    return bisect_right([context.start for context in contexts], position)


def place_of(call: Call, contexts: Sequence[Context]) -> tuple[int, int]:
    """Return the context number and prompt tokens of a call."""
    number = context_at(contexts, call.start)
    if not number:
        return number, call.start
    context = contexts[number - 1]
    return number, context.shared + call.start - context.start


def pieces(contexts: Sequence[Context], number: int, length: int) -> list[tuple[int, int]]:
    """Return the ranges [start, end) of the record that form a context, in order."""
    start, end = bounds(contexts, length)[number]
    if number == 0:
        return [(start, end)]
    context = contexts[number - 1]
    ranges: list[tuple[int, int]] = []
    remaining = context.shared
    for first, last in pieces(contexts, context.parent, length) if remaining else ():
        taken = min(remaining, last - first)
        if taken:
            ranges.append((first, first + taken))
        remaining -= taken
    return [*ranges, (start, end)]


def contexts_of(trajectory: Trajectory) -> Iterator[ContextTokens]:
    """Yield every context as a sequence."""
    for number in range(1 + len(trajectory.meta.contexts)):
        yield context_of(trajectory, number)


def context_of(trajectory: Trajectory, number: int) -> ContextTokens:
    """Return a context as a sequence; the first has number 0."""
    *shared, (start, end) = pieces(trajectory.meta.contexts, number, trajectory.length)
    parts = [*shared, (start, end)]
    own = sum(last - first for first, last in shared)

    def joined(values: Sequence[Any], dtype: type) -> np.ndarray[Any, Any]:
        return np.concatenate([np.asarray(values[first:last], dtype) for first, last in parts])

    return ContextTokens(
        number=number,
        own=own,
        start=start,
        token_ids=joined(trajectory.token_ids, np.int32),
        logprobs=_given(joined(trajectory.logprobs, np.float32), own, np.nan),
        sampler_logprobs=_given(joined(trajectory.sampler_logprobs, np.float32), own, np.nan),
        loss_mask=_given(joined(trajectory.loss_mask, np.uint8), own, 0),
    )


def _given(values: np.ndarray[Any, Any], own: int, empty: float) -> np.ndarray[Any, Any]:
    values[:own] = empty
    return values


def tokens_before(trajectory: Trajectory, position: int) -> list[int]:
    """Return the model's input when it sampled the token at this index."""
    if not trajectory.meta.contexts:
        return list(trajectory.token_ids[:position])
    context = context_of(trajectory, context_at(trajectory.meta.contexts, position))
    token_ids: list[int] = context.token_ids[: context.own + position - context.start].tolist()
    return token_ids


def prompt_digest(token_ids: Sequence[int] | np.ndarray[Any, Any]) -> str:
    """Return the digest of a call's prompt that its seed uses."""
    return sha256_hex(np.asarray(token_ids, "<i4").tobytes())


TrainedRow = tuple[Sequence[int], Sequence[int], Sequence[float | None]]
"""Token ids, loss mask and log-probs."""


def row_of(trajectory: Trajectory, number: int) -> TrainedRow:
    """Return a context for training; the record itself if it is the only one."""
    if not trajectory.meta.contexts:
        return trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs
    context = context_of(trajectory, number)
    return context.token_ids.tolist(), context.loss_mask.tolist(), context.logprobs.tolist()


def choices_of(trajectory: Trajectory, number: int) -> Choices | None:
    """Return the routed experts of a context, [tokens, layers, per_token], None if not recorded
    (`schemas.routes`)."""
    routes = trajectory.routed_experts
    if routes is None:
        return None
    parts = pieces(trajectory.meta.contexts, number, trajectory.length)
    choices = routes.choices
    return np.concatenate([choices[first:last] for first, last in parts])


def rows_of(trajectory: Trajectory) -> list[TrainedRow]:
    """Return every context for training, in order."""
    return [row_of(trajectory, number) for number in range(1 + len(trajectory.meta.contexts))]


def counted_places(trajectory: Masked) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """Return the ascending record indices of trainable sampled tokens: all except a context's first
    token, which nothing predicts."""
    counted = np.array(trajectory.loss_mask, dtype=bool)
    alone = [context.start for context in trajectory.meta.contexts if not context.shared]
    counted[[start for start in (0, *alone) if start < len(counted)]] = False
    return np.flatnonzero(counted)


def counted_tokens(trajectory: Trajectory) -> list[int]:
    places = counted_places(trajectory)
    ends = [end for _, end in bounds(trajectory.meta.contexts, trajectory.length)]
    before = [0, *np.searchsorted(places, ends).tolist()]
    return [last - first for first, last in pairwise(before)]


def check_contexts(
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


def call_fault(trajectory: Trajectory) -> str:
    """Return why its calls are not those of a correctly served agent, empty if they are.

    Calls must cover each sampled token once, in one context each, with unique seeds derived from
    the trajectory's seed, prompt and occurrence.
    """
    meta = trajectory.meta
    sampled = np.array(trajectory.loss_mask, dtype=bool)
    for call in sorted(meta.calls, key=lambda call: (call.start, call.end)):
        if not sampled[call.start : call.end].all():
            return f"the call at token {call.start} has tokens that were given, or another call's"
        sampled[call.start : call.end] = False
        if context_at(meta.contexts, max(call.start, call.end - 1)) != (
            context_at(meta.contexts, call.start)
        ):
            return f"the call at token {call.start} goes beyond its context"
        if call.answered_ns < call.asked_ns:
            return f"the call at token {call.start} was answered before it was asked"
    if sampled.any():
        return f"token {int(sampled.argmax())} was sampled for no call"
    return _seed_fault(trajectory)


def _seed_fault(trajectory: Trajectory) -> str:
    meta, occurrences = trajectory.meta, set[tuple[str, int]]()
    by_context: dict[int, list[Call]] = {}
    for call in meta.calls:
        by_context.setdefault(place_of(call, meta.contexts)[0], []).append(call)
    for number, calls in sorted(by_context.items()):
        ids = context_of(trajectory, number).token_ids
        for call in calls:
            prompt = prompt_digest(ids[: place_of(call, meta.contexts)[1]])
            if call.seed != call_seed(meta.seed, prompt, call.occurrence):
                return f"the seed of the call at token {call.start} does not follow from its prompt"
            if (prompt, call.occurrence) in occurrences:
                return f"the call at token {call.start} occurs twice"
            occurrences.add((prompt, call.occurrence))
    return ""
