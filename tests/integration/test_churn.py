"""Tests of runs with one worker under a wide bound, and with workers that join and leave."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.audit.report import AuditReport
from dora_pipe.core.pure.records import Append
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.schemas.control import Command
from dora_pipe.schemas.wire import encode
from tests.support.cluster import ORCHESTRATOR, TRAINER, Cluster, make_config
from tests.support.games import Games
from tests.support.tiers import more

CHANGES: dict[str, dict[str, object]] = {
    "dora": {"staleness__async_batches": 3.0},
    "partial_rollout": {"staleness__async_batches": 3.0, "staleness__partial_rollout": True},
}
STEPS = 12
EVERY_TICKS = 30
LIVING_MIN, LIVING_MAX = 1, 4
KIND = pytest.mark.parametrize("kind", CHANGES)


def clean(cluster: Cluster) -> AuditReport:
    report = audit(cluster.bus, cluster.topics, cluster.store.root)
    assert report.holds, [violation.line for violation in report.violations[:8]]
    assert report.steps == cluster.config.run.steps
    return report


@KIND
def test_one_worker_with_eta_three_is_live_and_clean(tmp_path: Path, kind: str) -> None:
    wide = {"staleness__max_staleness": 3, "staleness__async_batches": 4.0}
    config = make_config(run__steps=STEPS, **(CHANGES[kind] | wide))
    with Cluster(tmp_path / "run", config, workers=("w0",), train_ticks=4) as cluster:
        cluster.run()
        report = clean(cluster)
    assert report.staleness_max is not None
    assert 1 <= report.staleness_max <= 3


class Churn:
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.chance = random.Random(seed)
        self.joined = 0
        self.done: dict[str, int] = {}
        self.going: set[str] = set()

    def turn(self) -> None:
        living = sorted(self.cluster.roles.keys() - {ORCHESTRATOR, TRAINER} - self.going)
        happens: Callable[[str], None] = self.join
        if len(living) > LIVING_MIN and (len(living) >= LIVING_MAX or self.chance.random() < 0.5):
            ends = [self.kill, self.retire, self.drain]
            self.chance.shuffle(ends)
            happens = min(ends, key=lambda value: self.done.get(value.__name__, 0))
        happens(self.chance.choice(living) if living else "")
        self.done[happens.__name__] = self.done.get(happens.__name__, 0) + 1

    def kill(self, name: str) -> None:
        self.cluster.kill(name)

    def retire(self, name: str) -> None:
        self.going.add(name)
        self.cluster.stop(name)

    def drain(self, name: str) -> None:
        self.going.add(name)
        drain = Command(at_ns=0, user="u", verb="drain", args={"worker": name})
        topic = self.cluster.topics.control
        self.cluster.bus.writer().append([Append(topic=topic, value=encode(drain))])

    def join(self, _: str) -> None:
        self.cluster.start(f"x{self.joined}")
        self.joined += 1


@KIND
@pytest.mark.parametrize("seed", [1, *more([2])])
def test_workers_that_come_and_go_all_the_time_leave_the_run_clean(
    tmp_path: Path, kind: str, seed: int
) -> None:
    config = make_config(
        run__steps=STEPS,
        timing__lease_s=0.4,
        rollout__max_attempts=40,
        sampling__max_tokens=200,
        **CHANGES[kind],
    )
    with Cluster(tmp_path / "run", config, train_ticks=4) as cluster:
        churn = Churn(cluster, seed)
        while cluster.roles:
            cluster.ticks(EVERY_TICKS)
            if ORCHESTRATOR in cluster.roles:
                churn.turn()
        report = clean(cluster)
    assert churn.done.keys() == {"kill", "retire", "drain", "join"}, churn.done
    assert report.finished


@KIND
def test_episodes_that_can_be_told_again_survive_all_that(tmp_path: Path, kind: str) -> None:
    config = make_config(
        run__steps=6,
        timing__lease_s=0.4,
        rollout__max_attempts=40,
        task__max_turns=8,
        workers__checkpoint_tokens=4,
        **CHANGES[kind],
    )
    tasks = partial(Games, seed=5, turns=4)
    machines: list[WorkerMachine] = []
    with Cluster(tmp_path / "run", config, tasks=tasks, train_ticks=30) as cluster:
        churn = Churn(cluster, 3)
        while cluster.roles:
            for name in cluster.roles.keys() - {ORCHESTRATOR, TRAINER}:
                machines.append(cluster.roles[name].machine)
            cluster.ticks(EVERY_TICKS)
            if ORCHESTRATOR in cluster.roles:
                churn.turn()
        assert clean(cluster).finished
    counts = sum(
        ({id(machine): machine.requests.counts for machine in machines}).values(), Counter[str]()
    )
    assert counts["turns told again"] >= 10
    assert counts["progress unusable"] == 0
