"""Reader of metrics in Prometheus's text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dora_pipe.observe.metrics.exporter import Exporter
from dora_pipe.observe.metrics.metric import families
from dora_pipe.observe.metrics.table import METRICS
from dora_pipe.observe.run_stats import RunStats


def page_of(exporter: Exporter) -> str:
    registry = CollectorRegistry()
    registry.register(exporter)
    return generate_latest(registry).decode()


def values_on(page: str) -> dict[str, float]:
    """Return samples by name and labels, without the label `run`.

    Example: ``{'dora_pipe_migrations_total{stage="decided"}': 3.0}``
    """
    results: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            labels = sorted(set(sample.labels.items()) - {("run", sample.labels["run"])})
            inner = ",".join(f'{key}="{value}"' for key, value in labels)
            name = f"{sample.name}{{{inner}}}" if inner else sample.name
            assert name not in results, name
            results[name] = sample.value
    return results


def values_of(stats: RunStats) -> dict[str, float]:
    exporter = Exporter(stats.run, lambda _: [])
    exporter.families = families(METRICS, stats)
    return values_on(page_of(exporter))
