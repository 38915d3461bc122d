"""Definition of a metric, and its conversion to a prometheus_client family."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from dora_pipe.observe.run_stats import Histogram, RunStats

PREFIX: Final = "dora_pipe_"

Kind = Literal["gauge", "counter", "histogram"]
Value = float | Histogram
Samples = Value | Mapping[Any, Value] | None
"""One value, or a value per label (a tuple for several labels); None if unknown."""
Read = Callable[[RunStats], Samples]


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric of one run. Every sample also has the label `run`."""

    kind: Kind
    spec: str
    """`name{label,label}` without `PREFIX`; the name ends with its unit, counters with `_total`."""
    meaning: str
    read: Read

    @property
    def name(self) -> str:
        return self.spec.partition("{")[0]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(filter(None, self.spec.partition("{")[2].rstrip("}").split(",")))

    @property
    def full(self) -> str:
        return PREFIX + self.name

    def family(self, stats: RunStats) -> Family:
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
        samples = self.read(stats)
        if isinstance(samples, Mapping):
            for key, value in sorted(samples.items()):
                own = key if isinstance(key, tuple) else (key,)
                yield (stats.run, *map(str, own)), value
        elif samples is not None:
            yield (stats.run,), samples


def _bound(top: float) -> str:
    return "+Inf" if math.isinf(top) else str(top)


def gauge(spec: str, meaning: str, read: Read) -> Metric:
    return Metric("gauge", spec, meaning, read)


def counter(spec: str, meaning: str, read: Read) -> Metric:
    return Metric("counter", spec, meaning, read)


def histogram(spec: str, meaning: str, read: Read) -> Metric:
    return Metric("histogram", spec, meaning, read)


def families(metrics: Sequence[Metric], stats: RunStats) -> list[Family]:
    """Return every metric that has a sample, in table order."""
    return [family for metric in metrics if (family := metric.family(stats)).samples]
