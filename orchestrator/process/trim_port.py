"""Port that deletes old metrics records, in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Final

from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.loop.effect_runner import EffectRunner, Handler
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.orchestrator.trimming import MetricsTrimmed, TrimMetrics
from dora_pipe.schemas.metrics import OrchestratorStatus, decode_metrics

GRAIN: Final = 1000
"""Precision in offsets."""

SCAN_RECORDS_MAX: Final = 5000
"""Records scanned for one of the orchestrator's."""

SCAN_POLLS_MAX: Final = 20
POLL_S: Final = 1.0
RECORDS_MAX: Final = 500

PIECES_MAX: Final = 200
"""`Bus.trim` calls per effect."""

PAUSE_S: Final = 0.02
"""Pause that lets appends proceed."""

CLOSE_S: Final = 5.0


class TrimPort(EffectRunner[TrimMetrics, MetricsTrimmed]):
    """Opens the log for every trim; stops after the current piece."""

    def __init__(
        self, open_bus: Callable[[], Bus], *, sleep: Callable[[float], None], in_thread: bool = True
    ) -> None:
        self._open_bus = open_bus
        self._sleep = sleep
        handler = Handler(TrimMetrics, self._trim, _later)
        super().__init__(
            "trim", [handler], asked_max=1, in_thread=in_thread, close_s=CLOSE_S, finish=False
        )

    def _trim(self, effect: TrimMetrics) -> Iterator[MetricsTrimmed | None]:
        pieces = 0
        with closing(self._open_bus()) as bus:
            for tp, limit in effect.limits.items():
                before = cut_of(bus, tp, limit=limit, before_ns=effect.before_ns)
                while bus.trim(tp, before):
                    pieces += 1
                    if pieces == PIECES_MAX:
                        yield MetricsTrimmed(more=True)
                        return
                    yield None
                    self._sleep(PAUSE_S)
        yield MetricsTrimmed(more=False)


def _later(effect: TrimMetrics, error: Exception) -> list[MetricsTrimmed]:
    return [MetricsTrimmed(more=False)]


def cut_of(bus: Bus, tp: TopicPartition, *, limit: int, before_ns: int) -> int:
    """Return a position up to `limit` before which every record is older, exact to `GRAIN`."""
    low, high = bus.begin(tp), limit
    with closing(bus.reader({tp: low})) as reader:
        while high - low > GRAIN:
            middle = (low + high) // 2
            if _is_before(reader, tp, middle, before_ns):
                low = middle
            else:
                high = middle
    return low


def _is_before(reader: Reader, tp: TopicPartition, position: int, before_ns: int) -> bool:
    reader.seek(tp, position)
    records = 0
    for _ in range(SCAN_POLLS_MAX):
        for record in reader.poll(timeout_s=POLL_S, records_max=RECORDS_MAX):
            try:
                status = decode_metrics(record.value)
            except SchemaError:
                continue
            if isinstance(status, OrchestratorStatus):
                return status.at_ns < before_ns
            records += 1
        if records >= SCAN_RECORDS_MAX:
            break
    return False
