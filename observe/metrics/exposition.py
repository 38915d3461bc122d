"""What a metric is, and how Prometheus reads it: its text format, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dora_pipe.observe.run_stats import Histogram, RunStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

PREFIX: Final = "dora_pipe_"

Kind = Literal["gauge", "counter", "histogram"]
Value = float | Histogram
Samples = Value | Mapping[Any, Value] | None
"""The one sample of a metric without labels, or one per value of its label, a tuple for several
labels; None where nothing is known."""
Read = Callable[[RunStats], Samples]

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of one run. Every sample has the label `run` beside those named here."""

    kind: Kind
    spec: str
    """`name{label,label}` without `PREFIX`: the unit ends the name, and `_total` a counter's."""
    meaning: str
    source: str
    """Which records say it."""
    read: Read

    @property
    def name(self) -> str:
        """As Prometheus has it, without `PREFIX`."""
        return self.spec.partition("{")[0]

    @property
    def labels(self) -> tuple[str, ...]:
        """Beside `run`."""
        return tuple(filter(None, self.spec.partition("{")[2].rstrip("}").split(",")))

    @property
    def full(self) -> str:
        """The name as Prometheus has it."""
        return PREFIX + self.name

    def samples(self, stats: RunStats) -> Iterator[tuple[tuple[str, ...], Value]]:
        """(values of the labels, value), in the order of the labels' values."""
        found = self.read(stats)
        if isinstance(found, Mapping):
            for key, value in sorted(found.items()):
                yield tuple(map(str, key if isinstance(key, tuple) else (key,))), value
        elif found is not None:
            yield (), found


def gauge(spec: str, meaning: str, source: str, read: Read) -> Metric:
    """What is so at a moment."""
    return Metric("gauge", spec, meaning, source, read)


def counter(spec: str, meaning: str, source: str, read: Read) -> Metric:
    """What only grows."""
    return Metric("counter", spec, meaning, source, read)


def histogram(spec: str, meaning: str, source: str, read: Read) -> Metric:
    """What was observed many times."""
    return Metric("histogram", spec, meaning, source, read)


def exposition(metrics: Sequence[Metric], stats: RunStats) -> str:
    """Every metric that has a sample, in the order of the table."""
    return "".join(f"{line}\n" for metric in metrics for line in _lines(metric, stats))


def _lines(metric: Metric, stats: RunStats) -> Iterator[str]:
    samples = list(metric.samples(stats))
    if samples:
        yield f"# HELP {metric.full} {metric.meaning.translate(_HELP_ESCAPES)}"
        yield f"# TYPE {metric.full} {metric.kind}"
    for values, value in samples:
        labels = [("run", stats.run), *zip(metric.labels, values, strict=True)]
        if isinstance(value, Histogram):
            for bound, count in value.cumulative():
                yield _sample(f"{metric.full}_bucket", [*labels, ("le", _number(bound))], count)
            yield _sample(f"{metric.full}_sum", labels, value.total)
            yield _sample(f"{metric.full}_count", labels, value.observations)
        else:
            yield _sample(metric.full, labels, value)


def _sample(name: str, labels: Sequence[tuple[str, str]], value: float) -> str:
    inner = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels)
    return f"{name}{{{inner}}} {_number(value)}"


def _number(value: float) -> str:
    """Shortest text that reads as the same number; whole ones without a point."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
