"""Appends what may be lost in a thread of its own, so that nobody waits for it; decides nothing.

A role's loop appends what must not be lost, and waits for it. A status must cost it nothing: not a
broker that is away from the metrics' partition alone, nor a write lock, nor a slow disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.port import Append, Writer
from dora_pipe.core.effect_runner import EffectRunner, Handler
from dora_pipe.core.errors import BusError

CLOSE_LIMIT_S: Final = 1.0
"""For the last records of a role that ends; a broker that is away must not hold it up."""


@dataclass(frozen=True, slots=True)
class _AppendLossy:
    """Records that may be lost."""

    records: Sequence[Append]


class BackgroundWriter:
    """Takes a plain writer and never waits for it. While an append is under way, others are left
    out: what they would say is said anew soon.

    Example: ``Runtime(..., status=BackgroundWriter(bus.writer()))``
    """

    def __init__(self, inner: Writer) -> None:
        self._inner = inner
        handler = Handler(do=self._append, failed=lambda effect, error: [error])
        self._runner = EffectRunner("status", {_AppendLossy: handler}, asked_max=1)

    def append(self, records: Sequence[Append]) -> list[int]:
        """Returns at once and knows no offsets. Raises what the last append raised."""
        if self._runner.working:
            return []
        failed = self._runner.poll()
        self._runner.start(_AppendLossy(records))
        for error in failed:
            raise error
        return []

    def close(self) -> None:
        """Wait a moment for what is under way, then let go of the writer; idempotent."""
        self._runner.close(wait_s=CLOSE_LIMIT_S)
        self._inner.close()

    def _append(self, effect: _AppendLossy) -> Iterable[BusError]:
        try:
            self._inner.append(effect.records)
        except BusError as error:  # the runtime says it once
            return [error]
        return ()
