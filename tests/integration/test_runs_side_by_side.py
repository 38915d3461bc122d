"""Two whole runs in one log, one name the beginning of the other: neither sees the other.

What one writes into the other's topics by mistake becomes a dead letter or counts for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.dead_letter import decode_dead_letter
from dora_pipe.schemas.headers import parse_headers
from tests.support.cluster import ORCHESTRATOR, TICKS_MAX, BriskBus, Cluster, Ears, make_config

STEPS = 4


@dataclass
class Beside(Cluster):
    log: Path = Path("log.sqlite")

    def open_bus(self, ears: Ears | None = None) -> Bus:
        bus = SqliteBus(self.log)
        self._buses.append(bus)
        return BriskBus(bus, ears or Ears())


Pair = tuple[Beside, Beside]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    clusters = [
        Beside(
            tmp_path / name,
            make_config(run__name=name, run__steps=STEPS, run__seed=seed),
            workers=("w0", "w1"),
            log=tmp_path / "log.sqlite",
        )
        for name, seed in (("a", 1), ("a-control", 2))
    ]
    yield clusters[0], clusters[1]
    for cluster in clusters:
        cluster.close()


def play(pair: Pair, until_step: int | None = None) -> None:
    for _ in range(TICKS_MAX):
        living = [side for side in pair if side.roles]
        if not living or (
            until_step is not None and all(got(cluster, until_step) for cluster in living)
        ):
            return
        for cluster in living:
            cluster.tick()
            revive(cluster)
    raise AssertionError("they do not end")


def revive(cluster: Beside) -> None:
    for name in () if got(cluster, STEPS) else cluster.workers:
        if name not in cluster.roles:
            cluster.start(name)


def got(cluster: Beside, step: int) -> bool:
    return ORCHESTRATOR not in cluster.roles or cluster.version >= step


def steps(cluster: Beside) -> list[int]:
    return [commit.step for commit in cluster.facts(StepCommitted)]


def runs_of_trajectories(cluster: Beside) -> set[str]:
    return {
        parse_headers(record.headers).run for record in cluster.records(cluster.topics.trajectories)
    }


def copy(source: Beside, target: Beside, kind: str) -> int:
    actual_records = source.records(getattr(source.topics, kind))
    topic = getattr(target.topics, kind)
    partitions = target.bus.partitions(topic)
    writer = target.bus.writer()
    for record in actual_records:
        writer.append(
            [
                Append(
                    topic=topic,
                    partition=record.partition % partitions,
                    key=record.key,
                    value=record.value,
                    headers=record.headers,
                )
            ]
        )
    writer.close()
    return len(actual_records)


def test_two_runs_in_one_log_end_proved_and_apart(pair: Pair) -> None:
    play(pair)
    for side in pair:
        assert steps(side) == list(range(STEPS))
        assert runs_of_trajectories(side) == {side.config.run.name}
        assert side.records(side.topics.dead_letters) == []
        assert side.clean_report().finished


def test_trajectories_of_another_run_become_dead_letters_and_are_not_trained(pair: Pair) -> None:
    a, other = pair
    play(pair, until_step=1)
    strangers = copy(other, a, "trajectories")
    assert strangers
    play(pair)
    letters = [
        decode_dead_letter(record.value, record.headers)
        for record in a.records(a.topics.dead_letters)
    ]
    assert 0 < len(letters) <= strangers
    assert {letter.reason for letter in letters} == {"a record of run a-control (at $.headers.run)"}
    assert {letter.topic for letter in letters} == {a.topics.trajectories}
    assert steps(a) == steps(other) == list(range(STEPS))
    assert other.records(other.topics.dead_letters) == []
    assert audit(other.bus, other.topics, other.store.root).holds
    named = [violation.line for violation in audit(a.bus, a.topics, a.store.root).violations]
    assert all("is of another run" in line for line in named)
    assert len(named) == strangers


def test_facts_of_another_run_stop_nothing_and_audit_names_them(pair: Pair) -> None:
    a, other = pair
    play(pair, until_step=1)
    assert copy(other, a, "control") > 5
    assert copy(other, a, "metrics") > 5
    play(pair)
    assert steps(other) == list(range(STEPS))
    assert audit(other.bus, other.topics, other.store.root).holds
    assert sorted(set(steps(a))) == list(range(STEPS))
    lines = [violation.line for violation in audit(a.bus, a.topics, a.store.root).violations]
    assert any("starts another run" in line and "a-control" in line for line in lines), lines
    assert any("step 0: is committed twice" in line for line in lines), lines
