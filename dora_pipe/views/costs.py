"""Where the CPU time of a run's roles went, from the metrics topic."""

from __future__ import annotations

from dataclasses import dataclass

from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.schemas.metrics import (
    AnyMetrics,
    Cost,
    OrchestratorStatus,
    TrainerStatus,
    WorkerStatus,
    decode_metrics,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown

POLL_S = 1.0
"""A log on a broker gives nothing to a reader that does not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCost:
    """One incarnation of a role with its last reported books."""

    role: str
    epoch: int
    cost: Cost


def role_costs(bus: Bus, topics: Topics) -> list[RoleCost]:
    """The last books of every incarnation, sorted by role and epoch."""
    at = TopicPartition(topics.metrics, 0)
    end = bus.end(at)
    reader = bus.reader({at: 0})
    last: dict[tuple[str, int], Cost] = {}
    try:
        while reader.position(at) < end:
            for record in reader.poll(timeout_s=POLL_S):
                try:
                    status = decode_metrics(record.value)
                except SchemaError:
                    continue
                if not isinstance(status, Unknown):
                    last[_who(status)] = status.cost
    finally:
        reader.close()
    return [
        RoleCost(role=role, epoch=epoch, cost=cost) for (role, epoch), cost in sorted(last.items())
    ]


def _who(status: AnyMetrics) -> tuple[str, int]:
    match status:
        case WorkerStatus():
            return status.worker, status.epoch
        case TrainerStatus():
            return "trainer", status.role_epoch
        case OrchestratorStatus():
            return "orchestrator", status.role_epoch
