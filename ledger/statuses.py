"""Latest status of every role; statuses are lossy, and older incarnations are ignored."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.schemas.metrics import (
    AnyMetrics,
    OrchestratorStatus,
    TrainerStatus,
    WorkerStatus,
    decode_metrics,
    merged,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown

ORCHESTRATOR: Final = "orchestrator"
TRAINER: Final = "trainer"
RATE_NS: Final = 10_000_000_000
POINTS_MAX: Final = 64


def role_of(status: AnyMetrics) -> str:
    match status:
        case WorkerStatus():
            return status.worker
        case TrainerStatus():
            return TRAINER
        case OrchestratorStatus():
            return ORCHESTRATOR


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """A worker's counters of tokens."""

    sampled: int = 0
    computed: int = 0
    reused: int = 0

    @property
    def reused_share(self) -> float:
        """Reused share of prompt tokens."""
        return self.reused / max(1, self.computed + self.reused)

    def __add__(self, other: WorkerCounts) -> WorkerCounts:
        return WorkerCounts(
            self.sampled + other.sampled,
            self.computed + other.computed,
            self.reused + other.reused,
        )


NOTHING_COUNTED: Final = WorkerCounts()


@dataclass(slots=True, kw_only=True)
class LastStatus:
    """Status of a role's newest incarnation."""

    status: AnyMetrics
    """With full progress."""
    before_it: WorkerCounts = NOTHING_COUNTED
    """Counters of earlier incarnations."""
    _points: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=POINTS_MAX))

    @property
    def incarnation(self) -> int:
        return self.status.incarnation

    @property
    def counts(self) -> WorkerCounts:
        """By all incarnations."""
        return self.before_it + _counts(self.status)

    @property
    def tokens_per_s(self) -> float:
        """Over about `RATE_NS`."""
        if len(self._points) < 2:
            return 0.0
        (first_ns, first), (last_ns, last) = self._points[0], self._points[-1]
        return (last - first) / ((last_ns - first_ns) / 1e9) if last_ns > first_ns else 0.0

    def note(self) -> None:
        self._points.append((self.status.at_ns, _counts(self.status).sampled))
        while len(self._points) > 2 and self.status.at_ns - self._points[1][0] > RATE_NS:
            self._points.popleft()


class Statuses:
    """Latest status of every role. Example: ``statuses.receive(status)``, then
    ``statuses.heard["w0"].status``."""

    def __init__(self) -> None:
        self.heard: dict[str, LastStatus] = {}
        """By role."""

    def receive(self, status: AnyMetrics) -> LastStatus | None:
        """Apply a status; None for an older incarnation."""
        role, incarnation = role_of(status), status.incarnation
        last = self.heard.get(role)
        if last is None or last.incarnation < incarnation:
            earlier = NOTHING_COUNTED if last is None else last.counts
            last = self.heard[role] = LastStatus(status=_whole(None, status), before_it=earlier)
        elif last.incarnation == incarnation:
            last.status = _whole(last.status, status)
        else:
            return None
        last.note()
        return last


def read_statuses(
    bus: Bus, topics: Topics, *, tail: int | None = None, until_ns: int | None = None
) -> list[AnyMetrics]:
    """Return statuses up to a time, in partition order. Raises BusError.

    `tail`: at least that many per partition, until one is old enough.
    """
    ends = ends_of(bus, topics.metrics)
    begins = {partition: bus.begin(partition) for partition in ends}
    while True:
        starts = dict(begins)
        if tail is not None:
            starts = {
                partition: max(begin, ends[partition] - tail) for partition, begin in begins.items()
            }
        statuses = (
            status
            for partition in ends
            for status in _read(bus, partition, starts[partition], ends[partition])
        )
        selected = [status for status in statuses if until_ns is None or status.at_ns <= until_ns]
        if selected or tail is None or starts == begins:
            return selected
        tail *= 4


def _read(bus: Bus, partition: TopicPartition, start: int, end: int) -> Iterator[AnyMetrics]:
    for record in records_of(bus, {partition: end}, start=start):
        with suppress(SchemaError):  # lossy; audit reports it
            status = decode_metrics(record.value)
            if not isinstance(status, Unknown):
                yield status


def _whole(before: AnyMetrics | None, status: AnyMetrics) -> AnyMetrics:
    if not isinstance(status, WorkerStatus):
        return status
    return merged(before if isinstance(before, WorkerStatus) else None, status)


def _counts(status: AnyMetrics) -> WorkerCounts:
    if not isinstance(status, WorkerStatus):
        return NOTHING_COUNTED
    return WorkerCounts(
        status.tokens_total,
        status.prompt_tokens_computed,
        status.prompt_tokens_reused,
    )
