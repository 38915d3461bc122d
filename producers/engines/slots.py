"""Requests in an engine's slots, their arrays for a step, and their routed experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dora_pipe.producers.engines.engine import EngineRequest, StopReason
from dora_pipe.producers.engines.requests import RunningRequest
from dora_pipe.schemas.routes import Choices, Routes, none_of, number_type

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Sampled tokens of a batch, with log-probs of policy and sampler (0 if greedy)."""

    tokens: Integers
    logprobs: Floats
    sampler_logprobs: Floats


class SlotRoutes:
    """Routed experts of the tokens in the slots.

    Experts computed at position p belong to token p + 1 (`schemas.routes`).

    Example: ``routes.enter(slot, request)``, ``routes.note(slots, positions, choices)`` after each
    pass, ``routes.since(slot, start, end)`` for an event.
    """

    def __init__(
        self, *, slots: int, context_tokens: int, experts: int, layers: int, per_token: int
    ) -> None:
        self._experts = experts
        shape = (slots, context_tokens + 1, layers, per_token)
        self._entries: Choices = np.zeros(shape, number_type(experts))  # Untouched pages.
        self._entries[:, 0] = none_of(experts)
        self._routed = np.zeros(slots, np.int64)
        self._wanted = np.zeros(slots, np.bool_)

    def enter(self, slot: int, request: EngineRequest) -> None:
        self._routed[slot], self._wanted[slot] = request.routed, request.params.routes

    def note(self, slots: Integers, positions: Integers, choices: Choices) -> None:
        """Store `choices` [rows, layers, per_token] of a pass."""
        self._entries[slots, positions + 1] = choices

    def since(self, slot: int, start: int, end: int, *, first: bool) -> Routes | None:
        """Return the experts of tokens [start, end), in the `first` event also of earlier unknown
        tokens; None if not requested."""
        if not self._wanted[slot]:
            return None
        begin = min(start, int(self._routed[slot])) if first else start
        return Routes.of(self._entries[slot, begin:end], self._experts)

    def adopt(self, slot: int, choices: Choices) -> None:
        """Store the experts of the first positions, as from `copied`."""
        self._entries[slot, 1 : choices.shape[1] + 1] = choices.transpose(1, 0, 2)

    def copied(self, slot: int, start: int, end: int) -> Choices:
        """Copy the experts of positions: [layers, end - start, per_token]."""
        return self._entries[slot, start + 1 : end + 1].transpose(1, 0, 2).copy()


@dataclass(slots=True, kw_only=True)
class SlotRequest(RunningRequest):
    slot: int
    routing: SlotRoutes | None
    imported: bool = False
    """It has an imported cache, which may differ bitwise and is never shared."""
    waited: bool = False
    """It has waited for a prefix; each waits once."""

    def routes_of(self, start: int, end: int) -> Routes | None:
        if self.routing is None:
            return None
        given = len(self.request.token_ids)
        return self.routing.since(self.slot, given + start, given + end, first=not start)


class SlotTable:
    """The requests in the slots of an engine, and their arrays."""

    def __init__(self, *, slots: int, context_tokens: int) -> None:
        self.length = np.zeros(slots, np.int64)
        """Sequence lengths; the last token is not in the cache."""
        self.cached = np.zeros(slots, np.int64)
        self.last = np.zeros(slots, np.int64)
        """Last token: the input of the next step."""
        self.prompts: list[Integers] = [self.last[:0]] * slots
        self.rows: dict[int, SlotRequest] = {}
        self._context_tokens = context_tokens

    def enter(self, row: SlotRequest, *, cached: int = 0) -> None:
        """Add a checked request with `cached` positions in the cache."""
        tokens = np.array(row.request.token_ids, np.int64)
        self.rows[row.slot], self.prompts[row.slot] = row, tokens
        self.length[row.slot], self.cached[row.slot] = len(tokens), cached
        self.last[row.slot] = tokens[-1]

    def leave(self, slot: int) -> None:
        self.prompts[slot] = self.last[:0]
        self.cached[slot] = 0
        del self.rows[slot]

    def prefill_again(self, slot: int) -> None:
        """Make the whole sequence the prompt, nothing cached."""
        self.prompts[slot] = np.array(self.rows[slot].sequence, np.int64)
        self.cached[slot] = 0

    def record(
        self, order: Integers, drawn: Drawn, wall_ns: Callable[[], int]
    ) -> dict[int, StopReason | None]:
        """Store drawn tokens of the slots of `order`; return the slots that emit, and why they
        end."""
        self.last[order] = drawn.tokens
        self.cached[order] = self.length[order]
        self.length[order] += 1
        emitting: dict[int, StopReason | None] = {}
        columns = (order, drawn.tokens, drawn.logprobs, drawn.sampler_logprobs)
        for slot, token, logprob, sampler_logprob in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            row = self.rows[slot]
            if not row.tokens:
                row.first_ns = wall_ns()
            reason = row.sample(token, logprob, sampler_logprob, self._context_tokens)
            if row.emits(reason):
                emitting[slot] = reason
        return emitting
