"""Tests of parts of a batch in `why`, `top` and the orchestrator."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.ledger.statuses import read_statuses
from dora_pipe.observe.top import frame
from dora_pipe.observe.why import why_now
from dora_pipe.orchestrator.process.recovery import read_rounds
from dora_pipe.schemas.metrics import OrchestratorStatus, TrainerStatus
from dora_pipe.schemas.rounds import TakePart
from tests.support.cluster import TICK_NS, Cluster, make_config
from tests.support.stats_stage import stats_of

HEARTBEATS = 4


def test_looks_at_a_run_name_the_part_that_is_waited_for_or_computed(tmp_path: Path) -> None:
    config = make_config(run__steps=6, trainer__batch_parts=4)
    phases: set[str] = set()
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        state = cluster.roles["orchestrator"].machine.state
        cluster.until(lambda: len(state.parts) == 2)
        answer = why_now(cluster.bus, cluster.topics, now_ns=cluster.clock.wall_ns())
        trainer = answer.roles[0]
        assert "taken in 2 parts" in trainer.text or "working: part " in trainer.text
        assert answer.alarms == ()
        stats = stats_of(cluster.bus, cluster.topics)
        lines = [line.text for line in frame(stats, cluster.clock.wall_ns()).numbers.lines]
        assert any(line.endswith("taken in 2 parts") for line in lines), lines
        for status in stats.heard.values():
            phases |= {status.phase} if isinstance(status, TrainerStatus) else set()
        cluster.run()
    assert phases


def test_a_part_that_is_taken_ends_the_wait_before_it_so_that_alarms_are_of_standstill(
    tmp_path: Path,
) -> None:
    config = make_config(run__steps=4, trainer__batch_parts=4)
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        state = cluster.roles["orchestrator"].machine.state
        cluster.until(lambda: len(state.parts) == 2)
        for name in cluster.workers:
            cluster.roles[name].frozen = True
        cluster.ticks(HEARTBEATS * int(config.timing.heartbeat_s * 1e9) // TICK_NS)
        rounds = [logged_round.round for logged_round in read_rounds(cluster.bus, cluster.topics)]
        statuses = [
            status
            for status in read_statuses(cluster.bus, cluster.topics)
            if isinstance(status, OrchestratorStatus)
        ]
    parts = [
        (round_.now_ns, decision.part)
        for round_ in rounds
        for decision in round_.decisions
        if isinstance(decision, TakePart)
    ]
    (wait,) = statuses[-1].waits
    assert wait.name == "groups"
    assert wait.description.endswith(f"for part {parts[-1][1] + 1}")
    assert wait.since_ns == parts[-1][0]
