"""Tests of audits of a live run: no read between two appends reports a violation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.report import AuditReport
from dora_pipe.bus.bus import Reader
from dora_pipe.core.pure.records import TopicPartition
from tests.support.cluster import ORCHESTRATOR, TRAINER, BriskBus, Cluster, Ears, make_config

TICKS = 20
"""Of the run whenever audit asks the bus for something."""


class BusyBus(BriskBus):
    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.bus, Ears())
        self._cluster = cluster

    def end(self, tp: TopicPartition) -> int:
        self._cluster.ticks(TICKS)
        return super().end(tp)

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        self._cluster.ticks(TICKS)
        return super().reader(positions)


def _lines(report: AuditReport) -> list[str]:
    return [violation.line for violation in report.violations]


def test_audit_holds_while_the_run_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, make_config(run__steps=12), on_disk=False) as cluster:
        bus = BusyBus(cluster)
        looks = 0
        while cluster.roles:
            cluster.ticks(23)
            report = audit(bus, cluster.topics, cluster.store.root)
            assert _lines(report) == [], f"look {looks}, {cluster.clock.ns} ns"
            looks += 1
        final = audit(cluster.bus, cluster.topics, cluster.store.root)
    assert looks > 2
    assert final.holds
    assert final.finished
    assert final.steps == 12


def test_committed_step_that_nobody_has_folded_counts_as_trained(tmp_path: Path) -> None:
    with Cluster(tmp_path, make_config(), on_disk=False) as cluster:
        cluster.until(lambda: cluster.version >= 2)
        machine = cluster.roles[TRAINER].machine
        cluster.until(lambda: machine.phase == "training")
        step = machine.history.next_step
        cluster.kill(ORCHESTRATOR)
        cluster.until(lambda: machine.history.next_step > step)
        report = audit(cluster.bus, cluster.topics, cluster.store.root)
    assert _lines(report) == []
    assert report.steps == step + 1
    (trained,) = (line.groups for line in report.outcomes if line.outcome == "trained")
    assert trained == 4 * (step + 1)
