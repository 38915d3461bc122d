"""Port that deletes old metrics records, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final, Never

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.loop.effect_runner import EffectRunner, Handler, unanswered
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.orchestrator.machine import STATUS_KEY, TrimMetrics
from dora_pipe.schemas.metrics import OrchestratorStatus, decode_metrics

PAUSE_S: Final = 0.02
"""Pause that lets appends proceed."""

CLOSE_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trimmed:
    """Retention of statuses."""

    keep_ns: int
    """0 keeps all."""
    open_bus: Callable[[], Bus]


class TrimPort(EffectRunner[TrimMetrics, Never]):
    """Opens the log for every trim; stops after the current piece."""

    def __init__(
        self, open_bus: Callable[[], Bus], *, sleep: Callable[[float], None], in_thread: bool = True
    ) -> None:
        self._open_bus = open_bus
        self._sleep = sleep
        handler = Handler[TrimMetrics, Never](TrimMetrics, self._trim, unanswered)
        super().__init__(
            "trim", [handler], asked_max=1, in_thread=in_thread, close_s=CLOSE_S, finish=False
        )

    def _trim(self, effect: TrimMetrics) -> Iterator[None]:
        with closing(self._open_bus()) as bus:
            for tp, end in ends_of(bus, effect.topic).items():
                before = cut_of(bus, tp, end=end, before_ns=effect.before_ns)
                while bus.trim(tp, before):
                    yield None
                    self._sleep(PAUSE_S)


def cut_of(bus: Bus, tp: TopicPartition, *, end: int, before_ns: int) -> int:
    """Return a position before which every record is older: that of the orchestrator's last old
    status. Each trim reads what has become old since the last."""
    cut = bus.begin(tp)
    with closing(records_of(bus, {tp: end}, start=cut)) as records:
        for record in records:
            if record.key != STATUS_KEY:
                continue
            with suppress(SchemaError):
                status = decode_metrics(record.value)
                if isinstance(status, OrchestratorStatus):
                    if status.at_ns >= before_ns:
                        break
                    cut = record.offset
    return cut
