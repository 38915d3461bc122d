"""Deletion of old metrics records, in a thread.

Age is that of the orchestrator's own records; the last ten minutes always stay, so a new reader
finds a full status of every living role. Kafka's `retention.ms` skipped: a user might set it on
topics that a run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, Final

import msgspec

from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.loop.effect_runner import EffectRunner, Handler, Handlers
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.schemas.metrics import OrchestratorStatus, decode_metrics

TRIM_EVERY_NS: Final = 3600 * 10**9
"""Interval between trims."""

AGAIN_NS: Final = 60 * 10**9
"""Interval if old records remain."""

GUARD_NS_MIN: Final = 600 * 10**9
"""Minimum age; two full-status periods if longer."""


class TrimMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: delete old metrics records."""

    before_ns: int
    """Wall clock."""
    limits: Mapping[TopicPartition, int]
    """Exclusive upper offsets by partition."""


class MetricsTrimmed(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a trim finished or failed."""

    more: bool


class TrimSchedule:
    """Trim schedule; inactive if `keep_ns` is 0."""

    def __init__(self, *, keep_ns: int, whole_ns: int) -> None:
        """`whole_ns`: interval of full worker statuses."""
        self._keep_ns = keep_ns
        self._guard_ns = max(GUARD_NS_MIN, 2 * whole_ns)
        self._read: dict[TopicPartition, int] = {}
        self._marks: tuple[int, dict[TopicPartition, int]] | None = None
        """Positions read, and when; future limits."""
        self._limits: dict[TopicPartition, int] = {}
        self._due_ns = 0

    def note(self, record: Record) -> None:
        """Note a status."""
        self._read[record.at] = record.offset + 1

    def note_trimmed(self, event: MetricsTrimmed, *, mono_ns: int) -> None:
        if event.more:
            self._due_ns = min(self._due_ns, mono_ns + AGAIN_NS)

    def ask(self, *, mono_ns: int, wall_ns: int) -> list[TrimMetrics]:
        """Return a trim if one is due."""
        if not self._keep_ns or mono_ns < self._due_ns:
            return []
        if self._marks is None:
            self._marks = mono_ns, dict(self._read)
        elif mono_ns - self._marks[0] >= self._guard_ns:
            self._limits = self._marks[1]
            self._marks = mono_ns, dict(self._read)
        if not self._limits:
            return []
        self._due_ns = mono_ns + TRIM_EVERY_NS
        return [TrimMetrics(before_ns=wall_ns - self._keep_ns, limits=self._limits)]


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


class TrimPort:
    """`core.loop.runtime.Port` that opens the log for every trim."""

    effects: tuple[type, ...] = (TrimMetrics,)

    def __init__(
        self, open_bus: Callable[[], Bus], *, sleep: Callable[[float], None], in_thread: bool = True
    ) -> None:
        self._open_bus = open_bus
        self._sleep = sleep
        handlers: Handlers = {TrimMetrics: Handler(do=self._trim, failed=_later)}
        self._runner = EffectRunner("trim", handlers, asked_max=1, in_thread=in_thread)

    @property
    def busy(self) -> bool:
        return self._runner.busy

    def start(self, effect: TrimMetrics) -> None:
        """Start the trim."""
        self._runner.start(effect)

    def poll(self) -> list[Any]:
        return self._runner.poll()

    def close(self) -> None:
        """Stop after the current piece; idempotent."""
        self._runner.close(wait_s=CLOSE_S, finish=False)

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
