"""The metrics of a run, one table: what each is called, means, and which records say it.

docs/metrics.md is printed from `METRICS`, and so is what Prometheus reads. It decides nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dora_pipe.telemetry.metric import Metric, Sample, counter, each, gauge, histogram, one
from dora_pipe.telemetry.metrics_roles import ROLES, WORKERS
from dora_pipe.telemetry.metrics_training import GROUPS, TRAINING
from dora_pipe.telemetry.tally import Tally


def _info(tally: Tally) -> Iterator[Sample]:
    if tally.started is not None:
        yield (tally.started.package, tally.started.planner), 1


def _lag(tally: Tally) -> float:
    """What is said behind the last round of a run is for nobody."""
    return 0 if tally.over else max(0, tally.control_end - tally.control_folded)


RUN: Final = (
    gauge("run_info", "Always 1.", "run started", _info, "package", "planner"),
    gauge("log_up", "1 while the log can be read.", "the reader", one(lambda t: t.log_up)),
    gauge("run_over", "1 once the run has stopped.", "stop run", one(lambda t: t.over)),
    gauge(
        "last_record_timestamp_seconds",
        "The newest moment that a record carries, wall clock.",
        "all",
        one(lambda t: t.last_ns / 1e9 if t.last_ns else None),
    ),
    gauge("planned_steps", "Steps as configured.", "run started", one(lambda t: t.steps_planned)),
    gauge("policy_version", "The newest version.", "step committed", one(lambda t: t.version)),
    counter("rounds_total", "Rounds of the orchestrator.", "rounds", one(lambda t: t.rounds)),
    counter(
        "decisions_total", "Decisions, by kind.", "rounds", each(lambda t: t.decisions), "kind"
    ),
)

BUS: Final = (
    counter(
        "bus_records_total",
        "Records by topic. Those of metrics from the last 100 000 on; trajectories as they were "
        "named in control.",
        "all",
        each(lambda t: {name: told.records for name, told in t.topics.items()}),
        "topic",
    ),
    counter(
        "bus_bytes_total",
        "Bytes of the values of these records.",
        "all",
        each(lambda t: {name: told.bytes for name, told in t.topics.items()}),
        "topic",
    ),
    counter(
        "bus_unreadable_records_total",
        "Those of them that could not be read.",
        "all",
        each(lambda t: {name: told.unreadable for name, told in t.topics.items()}),
        "topic",
    ),
    gauge(
        "bus_end_position",
        "Where the partition ends.",
        "the log",
        each(lambda t: {at: place.end for at, place in t.places.items()}),
        "topic",
        "partition",
    ),
    gauge(
        "exporter_lag_positions",
        "How far the reader that makes these metrics is behind the end of the partition.",
        "the reader",
        each(lambda t: {at: place.end - place.position for at, place in t.places.items()}),
        "topic",
        "partition",
    ),
    gauge(
        "orchestrator_lag_positions",
        "Control positions that no round has folded yet: how far the orchestrator is behind.",
        "rounds",
        one(_lag),
    ),
    histogram(
        "control_delay_seconds",
        "From when a fact happened to the round that folds it: writing, the bus, reading, and the "
        "difference of two wall clocks.",
        "control, rounds",
        lambda t: t.delay_s,
    ),
)

SECTIONS: Final[dict[str, tuple[Metric, ...]]] = {
    "The run": RUN,
    "Every role": ROLES,
    "Workers": WORKERS,
    "Groups and trajectories": GROUPS,
    "Training": TRAINING,
    "The bus": BUS,
}

METRICS: Final = tuple(metric for section in SECTIONS.values() for metric in section)
