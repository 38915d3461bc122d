"""Writer of statuses that never blocks the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.bus import Writer
from dora_pipe.core.errors import BusError
from dora_pipe.core.loop.effect_runner import EffectRunner, Handler
from dora_pipe.core.pure.records import Append

CLOSE_LIMIT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _AppendLossy:
    records: Sequence[Append]


class BackgroundWriter:
    """Non-blocking wrapper of a plain writer; drops records while an append is running."""

    def __init__(self, inner: Writer) -> None:
        self._inner = inner
        handler = Handler(do=self._append, failed=lambda effect, error: [error])
        self._runner = EffectRunner("status", {_AppendLossy: handler}, asked_max=1)

    def append(self, records: Sequence[Append]) -> list[int]:
        """Return at once without offsets. Raises the error of the last append."""
        if self._runner.working:
            return []
        failed = self._runner.poll()
        self._runner.start(_AppendLossy(records))
        for error in failed:
            raise error
        return []

    def close(self) -> None:
        """Wait shortly for the running append, then close."""
        self._runner.close(wait_s=CLOSE_LIMIT_S)
        self._inner.close()

    def _append(self, effect: _AppendLossy) -> Iterable[BusError]:
        try:
            self._inner.append(effect.records)
        except BusError as error:  # the runtime logs it
            return [error]
        return ()
