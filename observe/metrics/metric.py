"""Describe a metric of a run, and read it as a family of prometheus_client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)

from dora_pipe.observe.run_stats import Histogram, RunStats

PREFIX: Final = "dora_pipe_"

Kind = Literal["gauge", "counter", "histogram"]
Value = float | Histogram
Samples = Value | Mapping[Any, Value] | None
"""The sample of a metric without labels, or one per value of its label, a tuple for several
labels; None where nothing is known."""
Read = Callable[[RunStats], Samples]


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of one run. Every sample has the label `run` beside those named here."""

    kind: Kind
    spec: str
    """`name{label,label}` without `PREFIX`: the unit ends the name, and `_total` a counter's."""
    meaning: str
    read: Read

    @property
    def name(self) -> str:
        """The name without `PREFIX`."""
        return self.spec.partition("{")[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels beside `run`."""
        return tuple(filter(None, self.spec.partition("{")[2].rstrip("}").split(",")))

    @property
    def full(self) -> str:
        """The name as Prometheus has it."""
        return PREFIX + self.name

    def family(self, stats: RunStats) -> Family:
        """The samples of a run, in the order of their labels' values."""
        labels = ("run", *self.labels)
        if self.kind == "histogram":
            histograms = HistogramMetricFamily(self.full, self.meaning, labels=labels)
            for values, value in self._samples(stats):
                assert isinstance(value, Histogram)
                buckets = [(_bound(top), count) for top, count in value.cumulative()]
                histograms.add_metric(values, buckets, value.total)
            return histograms
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(self.full, self.meaning, labels=labels)
        for values, value in self._samples(stats):
            family.add_metric(values, value)
        return family

    def _samples(self, stats: RunStats) -> Iterator[tuple[tuple[str, ...], Any]]:
        found = self.read(stats)
        if isinstance(found, Mapping):
            for key, value in sorted(found.items()):
                own = key if isinstance(key, tuple) else (key,)
                yield (stats.run, *map(str, own)), value
        elif found is not None:
            yield (stats.run,), found


def _bound(top: float) -> str:
    return "+Inf" if math.isinf(top) else str(top)


def gauge(spec: str, meaning: str, read: Read) -> Metric:
    """What is so at a moment."""
    return Metric("gauge", spec, meaning, read)


def counter(spec: str, meaning: str, read: Read) -> Metric:
    """What only grows."""
    return Metric("counter", spec, meaning, read)


def histogram(spec: str, meaning: str, read: Read) -> Metric:
    """What was observed many times."""
    return Metric("histogram", spec, meaning, read)


def families(metrics: Sequence[Metric], stats: RunStats) -> list[Family]:
    """Every metric that has a sample, in the order of the table."""
    return [family for metric in metrics if (family := metric.family(stats)).samples]
