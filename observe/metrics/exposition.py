"""Writes metrics as Prometheus reads them: its text format, version 0.0.4; it decides nothing.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from dora_pipe.observe.metrics.metric import Metric
from dora_pipe.observe.run_stats import Histogram, RunStats

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


def exposition(metrics: Sequence[Metric], stats: RunStats) -> str:
    """Every metric that has a sample, in the order of the table."""
    return "".join(f"{line}\n" for metric in metrics for line in _metric(metric, stats))


def _metric(metric: Metric, stats: RunStats) -> Iterator[str]:
    head = True
    for values, value in metric.read(stats):
        if head:
            yield f"# HELP {metric.full} {metric.meaning.translate(_HELP_ESCAPES)}"
            yield f"# TYPE {metric.full} {metric.kind}"
            head = False
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
