"""Clocks that are hours apart, run backwards or jump: the same run, decision by decision."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.rounds import AnyDecision, LeaseExpired, Round, TakeBatch, decode_round
from tests.support.cluster import ORCHESTRATOR, TRAINER, Cluster, make_config
from tests.support.worker import VirtualClock

HOUR_NS = 3_600 * 10**9
STEPS = 6


@dataclass
class MachineClock:
    true: VirtualClock
    wall_ahead_ns: int
    booted_ns: int
    backwards: bool = False
    """Its date runs backwards, twice as fast as time."""

    @property
    def ns(self) -> int:
        return self.true.ns

    def now_ns(self) -> int:
        return self.true.now_ns() + self.booted_ns

    def wall_ns(self) -> int:
        wall_ns = self.true.wall_ns() + self.wall_ahead_ns
        return wall_ns - 2 * self.true.ns if self.backwards else wall_ns

    def sleep(self, seconds: float) -> None:
        self.true.sleep(seconds)


SKEWS = {
    ORCHESTRATOR: (-5 * HOUR_NS, 17 * HOUR_NS, False),
    TRAINER: (3 * HOUR_NS, 0, False),
    "w0": (26 * HOUR_NS, 400 * HOUR_NS, False),
    "w1": (0, HOUR_NS, True),
    "w2": (-300_000 * HOUR_NS, 2 * HOUR_NS, False),
}
"""Ahead of the true date by, booted before by, backwards. The last machine lives before 1990."""


class Machines(Cluster):
    def start(self, name: str) -> None:
        true = self.clock
        ahead_ns, booted_ns, backwards = SKEWS[name]
        skewed = MachineClock(true, ahead_ns, booted_ns, backwards)
        self.clock = skewed  # type: ignore[assignment]
        try:
            super().start(name)
        finally:
            self.clock = true


def rounds_of(cluster: Cluster) -> list[Round]:
    return [decode_round(record.value) for record in cluster.records(cluster.topics.decisions)]


def decided(cluster: Cluster) -> list[tuple[int, int, list[AnyDecision]]]:
    return [
        (round_.ordinal, round_.control_next, [undated(decision) for decision in round_.decisions])
        for round_ in rounds_of(cluster)
    ]


def undated(decision: AnyDecision) -> AnyDecision:
    if not isinstance(decision, TakeBatch):
        return decision
    groups = tuple(
        msgspec.structs.replace(
            group,
            trajectories=tuple(
                msgspec.structs.replace(trajectory, sha256="") for trajectory in group.trajectories
            ),
        )
        for group in decision.groups
    )
    return msgspec.structs.replace(decision, groups=groups)


def weights(cluster: Cluster) -> list[str]:
    return [commit.digest_after for commit in cluster.facts(StepCommitted)]


def test_a_run_on_machines_whose_clocks_disagree_is_the_run_on_one_clock(tmp_path: Path) -> None:
    config = make_config(run__steps=STEPS)
    with Cluster(tmp_path / "one", config, on_disk=False) as cluster:
        cluster.run()
        expected, trained = decided(cluster), weights(cluster)
    with Machines(tmp_path / "many", config, on_disk=False) as many:
        many.run()
        assert many.clean_report().finished
        assert weights(many) == trained
        assert decided(many) == expected


def test_a_successor_on_a_machine_whose_clock_is_behind_never_turns_time_back(
    tmp_path: Path,
) -> None:
    with Machines(tmp_path, make_config(run__steps=STEPS), on_disk=False) as many:
        many.until(lambda: many.version >= 2)
        before = rounds_of(many)
        many.kill(ORCHESTRATOR)
        true = many.clock
        many.clock = MachineClock(true, -900 * HOUR_NS, 0, True)  # type: ignore[assignment]
        Cluster.start(many, ORCHESTRATOR)
        many.clock = true
        many.run()
        rounds = rounds_of(many)
        assert len(rounds) > len(before) + 5
        times = [round_.now_ns for round_ in rounds]
        assert times == sorted(times)
        observed_rounds = [observation for round_ in rounds for observation in round_.observations]
        assert not any(isinstance(expired, LeaseExpired) for expired in observed_rounds), (
            "no clock but the orchestrator's own decides who is silent"
        )
        many.clean_report()
