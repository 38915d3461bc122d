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
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.wire import sha256_hex


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
    """Agent's call to the model, which sampled tokens [start, end) of the record."""

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


def prompt_digest(token_ids: Sequence[int] | np.ndarray[Any, Any]) -> str:
    """Return the digest of a call's prompt that its seed uses."""
    return sha256_hex(np.asarray(token_ids, "<i4").tobytes())
