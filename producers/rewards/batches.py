"""Batching of reward functions that take lists.

A batch closes `WAIT_S` after its first call, or at `BATCH_MAX` calls. Synchronous functions run in
the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from dora_pipe.producers.tasks.calls import CallState
from dora_pipe.producers.tasks.execution import ELSEWHERE, PLACE, Place, call_user_code
from dora_pipe.producers.tasks.values import in_order

BATCH_MAX: Final = 64
WAIT_S: Final = 0.02


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """Calls answered together."""

    given: list[Mapping[str, Any]] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    places: list[Place] = field(default_factory=list)
    answers: asyncio.Task[Sequence[Any]] | None = None
    waiting: int = 0

    def report(self, state: CallState) -> None:
        """Report a state of all calls; none of them alone is in the main thread."""
        for place in self.places:
            place.report("beside" if state == "main" else state)


class Batches:
    """Adapter from single calls to a function of lists."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, options
        self._open: Batch | None = None

    async def ask(self, given: Mapping[str, Any]) -> Any:
        """Return the function's answer for one item. Raises its errors, and ValueError for a
        wrong number of answers."""
        batch = self._open
        if batch is None:
            batch = self._open = Batch()
            batch.answers = asyncio.create_task(self._answered(batch))
        assert batch.answers is not None
        index = len(batch.given)
        batch.given.append(given)
        batch.places.append(PLACE.get(ELSEWHERE))
        batch.waiting += 1
        if len(batch.given) == BATCH_MAX:
            self._close(batch)
        try:
            return (await asyncio.shield(batch.answers))[index]
        finally:
            batch.waiting -= 1
            if not batch.waiting:
                self._close(batch)
                batch.answers.cancel()
                await asyncio.wait([batch.answers])  # until the main thread is free

    def _close(self, batch: Batch) -> None:
        batch.full.set()
        if self._open is batch:
            self._open = None

    async def _answered(self, batch: Batch) -> Sequence[Any]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), WAIT_S)
        self._close(batch)
        lists = {name: [arguments[name] for arguments in batch.given] for name in batch.given[0]}
        first = batch.places[0]
        PLACE.set(Place(threads=first.threads, beside=first.beside, tell=batch.report))
        rewards = await call_user_code(partial(self._function, **lists, **self._options))
        return in_order("a reward of lists", rewards, len(batch.given))
