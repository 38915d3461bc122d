"""State of the requests in an engine's slots, as one array per property."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dora_pipe.producers.engines.engine import (
    EngineEvent,
    EngineRequest,
    RequestFinished,
    StopReason,
    TokensSampled,
)
from dora_pipe.producers.engines.requests import StopText
from dora_pipe.schemas.routes import Choices, Routes, none_of, number_type

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

NEVER = int(np.iinfo(np.int64).max)
NO_TOKEN = -1


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


class SlotTable:
    """The requests in the slots of an engine."""

    def __init__(
        self, *, slots: int, context_tokens: int, routes: SlotRoutes | None = None
    ) -> None:
        self.routes = routes
        self.length = np.zeros(slots, np.int64)
        """Sequence lengths; the last token is not in the cache."""
        self.cached = np.zeros(slots, np.int64)
        self.last = np.zeros(slots, np.int64)
        """Last token: the input of the next step."""
        self.prompts: list[Integers] = [self.last[:0]] * slots
        self._context_tokens = context_tokens
        self._names = [""] * slots
        self._given = np.zeros(slots, np.int64)  # tokens that the request came with
        self._arrivals = np.zeros(slots, np.int64)
        self._arrived = 0
        self._count = np.zeros(slots, np.int64)  # tokens sampled in this attempt
        self._sent = np.zeros(slots, np.int64)  # those already emitted
        self._limit = np.zeros(slots, np.int64)
        self._emit_at = np.zeros(slots, np.int64)
        self._emit_every = np.zeros(slots, np.int64)
        self._first_ns = np.zeros(slots, np.int64)
        self._stop_ids = np.full((slots, 1), NO_TOKEN, np.int64)
        self._stop_texts: dict[int, StopText] = {}
        self._tokens = np.zeros((slots, context_tokens), np.int64)
        self._logprobs = np.zeros((slots, context_tokens), np.float32)
        self._sampler_logprobs = np.zeros((slots, context_tokens), np.float32)

    def enter(
        self, slot: int, request: EngineRequest, stops: StopText | None, *, cached: int = 0
    ) -> None:
        """Add a checked request with `cached` positions in the cache."""
        params, tokens = request.params, np.array(request.token_ids, np.int64)
        self.prompts[slot] = tokens
        self.length[slot] = self._given[slot] = len(tokens)
        self.cached[slot] = cached
        self.last[slot] = tokens[-1]
        self._names[slot] = request.request
        self._arrivals[slot] = self._arrived
        self._arrived += 1
        self._count[slot] = self._sent[slot] = 0
        room = self._context_tokens - len(tokens)
        self._limit[slot] = min(params.max_tokens - request.sampled, room)
        self._emit_every[slot] = request.emit_every
        self._emit_at[slot] = request.emit_every or NEVER
        self._set_stop_ids(slot, params.stop_ids)
        if stops is not None:
            self._stop_texts[slot] = stops
        if self.routes is not None:
            self.routes.enter(slot, request)

    def leave(self, slot: int) -> str:
        """Remove the request of a slot; return its name."""
        self.prompts[slot] = self.last[:0]
        self._stop_texts.pop(slot, None)
        self.cached[slot] = 0
        return self._names[slot]

    def emit(self, slot: int) -> TokensSampled | None:
        start, end = int(self._sent[slot]), int(self._count[slot])
        if start == end:
            return None
        self._sent[slot] = end
        if self._emit_every[slot]:
            self._emit_at[slot] = end + self._emit_every[slot]
        return TokensSampled(
            request=self._names[slot],
            token_ids=self._tokens[slot, start:end].tolist(),
            logprobs=self._logprobs[slot, start:end].tolist(),
            sampler_logprobs=self._sampler_logprobs[slot, start:end].tolist(),
            first_token_ns=int(self._first_ns[slot]),
            routes=self._routes_of(slot, start, end),
        )

    def _routes_of(self, slot: int, start: int, end: int) -> Routes | None:
        if self.routes is None:
            return None
        given = int(self._given[slot])
        return self.routes.since(slot, given + start, given + end, first=not start)

    def prefill_again(self, slot: int) -> None:
        """Make the whole sequence the prompt, nothing cached."""
        self.prompts[slot] = self.sequence(slot)
        self.cached[slot] = 0

    def sequence(self, slot: int) -> Integers:
        """Return all tokens; invalid after an error."""
        count = int(self._count[slot])
        given = self.prompts[slot][: self.length[slot] - count]
        return np.concatenate([given, self._tokens[slot, :count]])

    def record(
        self, order: Integers, drawn: Drawn, wall_ns: Callable[[], int]
    ) -> list[EngineEvent]:
        """Store drawn tokens of the slots of `order`; return events by arrival.

        A log-prob that is not finite ends its request without that token.
        """
        counts = self._count[order]
        if not counts.all():
            self._first_ns[order[counts == 0]] = wall_ns()
        self._tokens[order, counts] = drawn.tokens
        self._logprobs[order, counts] = drawn.logprobs
        self._sampler_logprobs[order, counts] = drawn.sampler_logprobs
        self._count[order] = counts + 1
        self.last[order] = drawn.tokens
        self.cached[order] = self.length[order]
        self.length[order] += 1
        broken = ~np.isfinite(drawn.logprobs)
        stopped = (self._stop_ids[order] == drawn.tokens[:, None]).any(1)
        if self._stop_texts:
            stopped |= self._text_stops(order, drawn.tokens)
        full = self._count[order] >= self._limit[order]
        busy = broken | stopped | full | (self._count[order] >= self._emit_at[order])
        if not busy.any():
            return []
        reasons: dict[int, StopReason | None] = {}
        for row in np.flatnonzero(busy):
            slot = int(order[row])
            reasons[slot] = "length" if full[row] else None
            if stopped[row]:
                reasons[slot] = "stop"
            if broken[row]:
                reasons[slot] = "error"
        return self._events_of(reasons)

    def _events_of(self, reasons: dict[int, StopReason | None]) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for slot in sorted(reasons, key=lambda slot: int(self._arrivals[slot])):
            reason, error = reasons[slot], None
            if reason == "error":
                error = f"the logits of token {self.length[slot] - 1} are not finite"
                self._count[slot] -= 1
            sampled = self.emit(slot)
            if sampled is not None:
                events.append(sampled)
            if reason is not None:
                name = self._names[slot]
                events.append(RequestFinished(request=name, reason=reason, error=error))
        return events

    def _text_stops(self, order: Integers, tokens: Integers) -> Flags:
        watched = np.isin(order, list(self._stop_texts))
        stops = np.zeros(len(order), np.bool_)
        for row in np.flatnonzero(watched):
            stops[row] = self._stop_texts[int(order[row])].feed(int(tokens[row]))
        return stops

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self._stop_ids.shape[1]
        if missing > 0:
            wider = ((0, 0), (0, missing))
            self._stop_ids = np.pad(self._stop_ids, wider, constant_values=NO_TOKEN)
        self._stop_ids[slot] = NO_TOKEN
        self._stop_ids[slot, : len(stop_ids)] = stop_ids
