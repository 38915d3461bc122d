"""Prints reference/metrics.md from the code: every metric with type, labels, meaning and source.

python -m tests.support.metrics_page > docs/reference/metrics.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from dora_pipe.observe.metrics.metric import PREFIX, Metric
from dora_pipe.observe.metrics.table import SECTIONS

HEAD = f"""# Metrics

`dora-pipe metrics RUN` follows the log of a run, live or finished and wherever it lies, and serves
these numbers to Prometheus at http://127.0.0.1:9464/metrics. Roles serve nothing: one process makes
the metrics of all of them from what they write anyway
([why](../decisions/0018-metrics-are-made-from-the-log.md)). This page is printed from the code
(`python -m tests.support.metrics_page > docs/reference/metrics.md`); a test compares the two.

- Every name begins with `{PREFIX}`, and every sample has the label `run` beside those named here.
- Units are in the names: `seconds`, `bytes`, `tokens`, `steps`; positions are offsets of the log.
- `statuses` are what roles say of themselves: news with the next heartbeat, else every fifth one.
  They are lossy; everything else follows from facts and rounds, and is exact.
- Of a run that is over, what a role is or waits for is gone with it; counters and steps stay.
- Rates are for Prometheus to make: tokens/s is `rate({PREFIX}sampled_tokens_total[1m])`.

`infra/observe` has a Prometheus configuration, alert rules and Grafana dashboards that use them.
"""


def page() -> str:
    return "\n".join([HEAD, *(line for title in SECTIONS for line in _section(title))]) + "\n"


def _section(title: str) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| metric | type | labels | meaning | source |"
    yield "| --- | --- | --- | --- | --- |"
    yield from map(_row, SECTIONS[title])
    yield ""


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    cells = (f"`{metric.full}`", metric.kind, labels, metric.meaning, metric.source)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.stdout.write(page().rstrip("\n") + "\n")
