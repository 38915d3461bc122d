"""Tests of partial rollout with workers that come and go; the simulator plays runs without it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.schemas.control import Command
from tests.support.cluster import ORCHESTRATOR, TRAINER, Cluster, make_config
from tests.support.games import Games

CHANGES = {
    "staleness__async_batches": 3.0,
    "staleness__partial_rollout": True,
    "timing__lease_s": 0.4,
    "rollout__max_attempts": 40,
}
STEPS = 8
EVERY_TICKS = 30
LIVING_MIN, LIVING_MAX = 1, 4


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
        self.cluster.tell(Command(at_ns=0, user="u", verb="drain", args={"worker": name}))

    def join(self, _: str) -> None:
        self.cluster.start(f"x{self.joined}")
        self.joined += 1


def test_workers_that_come_and_go_all_the_time_leave_the_run_clean(tmp_path: Path) -> None:
    config = make_config(run__steps=STEPS, sampling__max_tokens=200, **CHANGES)
    with Cluster(tmp_path / "run", config, train_ticks=4) as cluster:
        churn = Churn(cluster, 1)
        while cluster.roles:
            cluster.ticks(EVERY_TICKS)
            if ORCHESTRATOR in cluster.roles:
                churn.turn()
        report = cluster.clean_report()
    assert churn.done.keys() == {"kill", "retire", "drain", "join"}, churn.done
    assert report.finished and report.steps == STEPS


def test_episodes_that_can_be_told_again_survive_all_that(tmp_path: Path) -> None:
    turns = {"task__max_turns": 8, "workers__checkpoint_tokens": 4}
    config = make_config(run__steps=6, **turns, **CHANGES)
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
        assert cluster.clean_report().finished
    counts = sum(
        ({id(machine): machine.requests.counts for machine in machines}).values(), Counter[str]()
    )
    assert counts["turns told again"] >= 10
    assert counts["progress unusable"] == 0
