"""What the next part of a batch waits for, as `why`, `top` and the orchestrator say it."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.catalogue.statuses import read_statuses
from dora_pipe.observe.top import frame
from dora_pipe.observe.why.answer import why_now
from dora_pipe.observe.why.parts import next_part
from dora_pipe.orchestrator.recovery import read_rounds
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.waits import waits
from dora_pipe.schemas.metrics import OrchestratorStatus, TrainerStatus
from dora_pipe.schemas.rounds import TakePart
from tests.support.cluster import TICK_NS, Cluster, make_config
from tests.support.stats_stage import stats_of
from tests.unit.orchestrator.test_parts import finish, running

HEARTBEATS = 4


def words(state: State) -> str:
    found = next_part(state)
    assert found is not None
    return found.words


def test_part_waits_for_as_many_groups_as_it_lacks_whichever_finish() -> None:
    stage = running(groups__per_step=8, trainer__parts=4)
    stage.settle()
    assert words(stage.state) == "part 0 of step 0: 2 groups of version 0; "
    finish(stage, 0)
    assert words(stage.state) == "part 0 of step 0: 1 group of version 0; "
    finish(stage, 5)
    found = next_part(stage.state)
    assert found is not None
    assert (found.part, found.size, found.taken, found.finished, found.lacks) == (1, 2, 2, 0, 2)
    (standing,) = waits(stage.state)
    assert standing.words.endswith("for part 1")


def test_last_part_is_what_the_batch_lacks() -> None:
    stage = running()
    finish(stage, 0, 1, 2)
    found = next_part(stage.state)
    assert found is not None
    assert (found.part, found.size, found.taken, found.lacks) == (3, 1, 3, 1)


def test_groups_that_are_due_are_waited_for_by_name_of_their_step() -> None:
    stage = running()
    finish(stage, 0, 1, 2, 3)
    stage.commit()
    stage.worker("w1", slots=8)
    assert not finish(stage, 8, 9), "all four places of step 1 belong to those due at it"
    assert words(stage.state) == "part 0 of step 1: 1 group of version 0, due at step 1; "
    due = [one for one in stage.state.groups.values() if one.spec.deadline == 1]
    (taken,) = finish(stage, due[0].spec.ordinal)
    assert len(taken.groups) == 1


def test_nothing_is_said_of_parts_where_a_step_trains_or_there_are_none() -> None:
    stage = running()
    finish(stage, 0, 1, 2, 3)
    assert next_part(stage.state) is None
    whole = running(trainer__parts=1)
    whole.settle()
    assert next_part(whole.state) is None
    assert "part" not in waits(whole.state)[0].words
    assert next_part(State()) is None


def test_looks_at_a_run_name_the_part_that_is_waited_for_or_computed(tmp_path: Path) -> None:
    config = make_config(run__steps=6, trainer__parts=4)
    phases: set[str] = set()
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        state = cluster.roles["orchestrator"].machine.state
        cluster.until(lambda: len(state.parts) == 2)
        found = why_now(cluster.bus, cluster.topics, now_ns=cluster.clock.wall_ns())
        assert found.part is not None
        assert (found.part.part, found.part.taken, found.part.size) == (2, 2, 1)
        (trainer,) = [one for one in found.roles if one.id == "trainer"]
        assert "part 2 of step" in trainer.text or "works: part " in trainer.text
        assert found.alarms == ()
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
    config = make_config(run__steps=4, trainer__parts=4)
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        state = cluster.roles["orchestrator"].machine.state
        cluster.until(lambda: len(state.parts) == 2)
        for name in cluster.workers:
            cluster.roles[name].frozen = True
        cluster.ticks(HEARTBEATS * int(config.timing.heartbeat_s * 1e9) // TICK_NS)
        rounds = [one.round for one in read_rounds(cluster.bus, cluster.topics)]
        said = [
            one
            for one in read_statuses(cluster.bus, cluster.topics)
            if isinstance(one, OrchestratorStatus)
        ]
    parts = [
        (round_.now_ns, one.part)
        for round_ in rounds
        for one in round_.decisions
        if isinstance(one, TakePart)
    ]
    (wait,) = said[-1].waits
    assert wait.name == "groups"
    assert wait.words.endswith(f"for part {parts[-1][1] + 1}")
    assert wait.since_ns == parts[-1][0]
