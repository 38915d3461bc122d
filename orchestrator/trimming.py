"""Decides when old statuses are deleted, and which: what metrics records say is not kept for ever.

Statuses are dated by the orchestrator's own alone, and whatever a clock says, those of its last ten
minutes or more stay: every living role says a whole status in half of that time, so whoever begins
to read at what is left knows all of the present. A thread of its own deletes, in pieces.
Kafka's `retention.ms` is not used, because a user might set it on topics that a run cannot lose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, Final

import msgspec

from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.core.effect_runner import EffectRunner, Handler, Handlers
from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.metrics import OrchestratorStatus, decode_metrics

TRIM_EVERY_NS: Final = 3600 * 10**9
"""From one look for old statuses to the next."""

AGAIN_NS: Final = 60 * 10**9
"""The same where the last one has left some that are old enough."""

GUARD_NS_MIN: Final = 600 * 10**9
"""What was read so lately stays, or in the time of two whole statuses of a worker, if that is
longer."""


class TrimMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Delete statuses that were said before a moment, a bounded number."""

    before_ns: int
    """Wall clock."""
    limits: Mapping[TopicPartition, int]
    """Nothing from these positions on is deleted, whatever its date; no other partition is."""


class MetricsTrimmed(msgspec.Struct, frozen=True, kw_only=True):
    """It is done, or was not possible."""

    more: bool
    """There are more to delete."""


class TrimSchedule:
    """When one incarnation of the orchestrator asks for a trim. With `keep_ns` 0 it never does.

    Example: ``out.effects += schedule.ask(mono_ns=now.mono_ns, wall_ns=now.wall_ns)``
    """

    def __init__(self, *, keep_ns: int, whole_ns: int) -> None:
        """`whole_ns`: a worker says a whole status in that time (`status_schedule.whole_ns`)."""
        self._keep_ns = keep_ns
        self._guard_ns = max(GUARD_NS_MIN, 2 * whole_ns)
        self._read: dict[TopicPartition, int] = {}
        self._marks: tuple[int, dict[TopicPartition, int]] | None = None
        """What had been read, and when; it becomes the limits when it is old enough."""
        self._limits: dict[TopicPartition, int] = {}
        self._due_ns = 0

    def note(self, record: Record) -> None:
        """A status was read."""
        self._read[record.at] = record.offset + 1

    def note_trimmed(self, event: MetricsTrimmed, *, mono_ns: int) -> None:
        if event.more:
            self._due_ns = min(self._due_ns, mono_ns + AGAIN_NS)

    def ask(self, *, mono_ns: int, wall_ns: int) -> list[TrimMetrics]:
        """A trim, if one is due."""
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
"""The place to cut at is found so exactly, in offsets."""

SCAN_RECORDS_MAX: Final = 5000
"""Statuses looked through for one of the orchestrator's: 1000 workers' of a quiet period."""

SCAN_POLLS_MAX: Final = 20
POLL_S: Final = 1.0
RECORDS_MAX: Final = 500

PIECES_MAX: Final = 200
"""Calls of `Bus.trim` for one effect."""

PAUSE_S: Final = 0.02
"""Between two of them, for whoever waits to append."""

CLOSE_S: Final = 5.0


class TrimPort:
    """A `core.runtime.Port`. It opens the log anew for every trim: they are rare."""

    effects: tuple[type, ...] = (TrimMetrics,)

    def __init__(
        self,
        open_bus: Callable[[], Bus],
        *,
        sleep: Callable[[float], None],
        in_thread: bool = True,
    ) -> None:
        self._open_bus = open_bus
        self._sleep = sleep
        handlers: Handlers = {TrimMetrics: Handler(do=self._trim, failed=_later)}
        self._runner = EffectRunner("trim", handlers, asked_max=1, in_thread=in_thread)

    @property
    def busy(self) -> bool:
        return self._runner.busy

    def start(self, effect: TrimMetrics) -> None:
        """Hand it to the thread."""
        self._runner.start(effect)

    def poll(self) -> list[Any]:
        return self._runner.poll()

    def close(self) -> None:
        """End behind the present piece; idempotent."""
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
    """A position up to `limit`, before which every status was appended before a moment.

    The last such place but for `GRAIN` offsets; where the partition begins, if there is none.
    """
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
    """Whether the next status that the orchestrator said is as old; not, where none is found."""
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
