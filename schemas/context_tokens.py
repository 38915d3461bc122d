"""Contexts of a trajectory as token sequences, rows to train and checked calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from dora_pipe.schemas.contexts import Call, bounds, context_at, pieces, place_of, prompt_digest
from dora_pipe.schemas.identity import call_seed
from dora_pipe.schemas.routes import Choices
from dora_pipe.schemas.trajectory import Masked, Trajectory


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
