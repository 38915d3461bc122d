"""Recorded run on a SQLite log with many faults, once per session of all xdist workers.

It contains a worker killed during requests, a fenced worker that kept writing, a duplicate
trajectory, restarts of trainer and orchestrator, a `set` command, evaluations and invalid
rewards. The audit passes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.report import AuditReport
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config.load import dump_toml
from dora_pipe.core.pure.records import Append
from dora_pipe.ledger.reading import FILE
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.topics import Topics
from tests.support.cluster import ORCHESTRATOR, TICK_NS, TRAINER, Cluster, make_config

STEPS = 14
LEASE_S = 0.5
LEASE_TICKS = int(LEASE_S * 1e9) // TICK_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    directory: Path
    run: str

    @property
    def topics(self) -> Topics:
        return Topics(self.run)

    @property
    def log(self) -> Path:
        return self.directory / "log.sqlite"

    @property
    def store(self) -> Path:
        return self.directory / "policies"

    def open(self) -> SqliteBus:
        return SqliteBus(self.log)

    def copy(self, directory: Path) -> RecordedRun:
        shutil.copytree(self.directory, directory, ignore=shutil.ignore_patterns(FILE))
        return RecordedRun(directory=directory, run=self.run)


def record(directory: Path) -> RecordedRun:
    config = make_config(run__steps=STEPS, run__name="recorded", timing__lease_s=LEASE_S)
    with Cluster(directory, config) as cluster:
        (directory / "config.toml").write_text(dump_toml(config))
        _events(cluster)
        cluster.run()
    _settle(directory / "log.sqlite")
    return RecordedRun(directory=directory, run="recorded")


def _events(cluster: Cluster) -> None:
    cluster.until(lambda: cluster.version >= 2)
    _kill_worker_in_the_middle(cluster)
    cluster.until(lambda: cluster.version >= 3)
    cluster.restart(TRAINER)
    cluster.until(lambda: cluster.version >= 4)
    cluster.restart(ORCHESTRATOR)
    cluster.until(lambda: cluster.version >= 5)
    _let_a_worker_sleep_beyond_its_lease(cluster)
    _append_a_trajectory_again(cluster)
    changes = {"trainer.learning_rate": 2e-5}
    cluster.tell(Command(at_ns=0, user="u", verb="set", args=changes))


def _kill_worker_in_the_middle(cluster: Cluster) -> None:
    cluster.until(lambda: progress_is_known(cluster, "w1"))
    cluster.kill("w1")
    cluster.ticks(LEASE_TICKS + 30)
    cluster.start("w1")


def progress_is_known(cluster: Cluster, name: str) -> bool:
    rows = cluster.roles[name].machine.requests.by_key
    running = {row.place.trajectory for row in rows.values()}
    statuses = cluster.roles[ORCHESTRATOR].machine._statuses
    progress = (status.progress for (worker, _), status in statuses.items() if worker == name)
    return any(running & progress.keys() for progress in progress)


def _let_a_worker_sleep_beyond_its_lease(cluster: Cluster) -> None:
    role = cluster.roles["w0"]
    cluster.until(lambda: len(role.machine.requests.by_key) >= 4)
    role.frozen = True
    cluster.ticks(LEASE_TICKS + 30)
    role.frozen, role.ears.deaf = False, True
    logged = role.machine.requests.counts["logged"]
    cluster.until(lambda: role.machine.requests.counts["logged"] >= logged + 2)
    role.ears.deaf = False
    cluster.until(lambda: "w0" not in cluster.roles)
    cluster.start("w0")


def _append_a_trajectory_again(cluster: Cluster) -> None:
    topic = cluster.topics.trajectories
    first = [record for record in cluster.records(topic) if record.partition == 0]
    twice = next(record for record in first if dict(record.headers)["worker"] == b"w2")
    again = Append(
        topic=topic, partition=0, key=twice.key, value=twice.value, headers=twice.headers
    )
    cluster.bus.writer().append([again])


def _settle(log: Path) -> None:
    bus = SqliteBus(log)
    bus.close()


@cache
def recorded_in(directory: Path) -> RecordedRun:
    """Return this worker's copy, in its base directory, of the run that its session recorded."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return record(directory / "recorded")
    folder = directory.parent / "recorded"
    with (directory.parent / "recorded.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            record(directory / "recording")
            (directory / "recording").rename(folder)
    return RecordedRun(directory=folder, run="recorded").copy(directory / "recorded")


def audited(run: RecordedRun) -> AuditReport:
    with closing(run.open()) as bus:
        return audit(bus, run.topics, run.store)
