"""Workers that host several versions at once: who takes what, who keeps what, what is dropped."""

from __future__ import annotations

import copy
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.planner import plan
from dora_pipe.orchestrator.recovery import recover
from dora_pipe.orchestrator.snapshots import body_of, state_of
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.rounds import Assign, Move, Place
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage
from tests.support.orchestrator_world import World
from tests.unit.orchestrator.test_world import (
    FAULTY_S,
    check_index,
    check_nothing_is_left,
    finish,
    swarm,
)


def stage_of(**changes: Any) -> Stage:
    """Two siblings a group, one group a step, three groups in flight, eta 2."""
    keys = {
        "groups__per_step": 1,
        "groups__size": 2,
        "staleness__max_staleness": 2,
        "staleness__in_flight_batches": 3.0,
        "run__steps": 9,
    }
    return Stage(**(keys | changes)).begin(rows=30)


def held(stage: Stage, name: str = "w0") -> list[int]:
    return stage.state.residents[name].held


def step(stage: Stage, group: str) -> list[Assign]:
    """A group is finished and trained; the assignments of the plan that follows."""
    stage.finish_group(group)
    stage.settle()
    stage.commit()
    return [one for one in stage.plan() if isinstance(one, Assign)]


def test_every_worker_takes_the_newest_version_at_once_and_requests_keep_theirs() -> None:
    stage = stage_of()
    stage.worker("w0", slots=3, versions=3)
    stage.worker("w1", slots=3, versions=3)
    busy = [name for name in stage.running() if not name.startswith("g0000000000")]
    assigned = step(stage, "g0000000000")
    assert [(one.worker, one.version, one.drop) for one in assigned] == [
        ("w0", 1, ()),
        ("w1", 1, ()),
    ]
    assert all("keep theirs" in one.reason for one in assigned)
    stage.settle()
    assert held(stage) == [0, 1]
    assert set(busy) <= set(stage.running()), "nothing was moved or handed back"
    assert {stage.placed[name].spec.version for name in stage.running()} == {0, 1}
    assert not [one for one in stage.decided if isinstance(one, Move)]


def test_queued_requests_of_an_older_version_are_placed_while_the_newest_loads() -> None:
    stage = stage_of(groups__size=3)
    stage.worker("w0", slots=4, versions=2)
    assert [one.trajectory for one in stage.state.queues[0]] == [
        "g0000000001-001",
        "g0000000001-002",
    ]
    stage.finish_group("g0000000000")
    stage.state.workers["w0"].slots = 1  # Nothing is placed before the commit.
    stage.state.touch(stage.state.workers["w0"])
    stage.plan()
    stage.commit()
    stage.state.workers["w0"].slots = 4
    found = stage.plan()
    assert stage.state.workers["w0"].loading
    (place,) = [one for one in found if isinstance(one, Place)]
    assert (place.spec.version, len(place.siblings)) == (0, 2)


def test_version_without_open_groups_is_dropped_with_the_next_assignment() -> None:
    stage = stage_of(staleness__max_staleness=1, staleness__in_flight_batches=1.0)
    stage.worker("w0", slots=4, versions=4)
    for number in range(3):
        assigned = step(stage, f"g{number:010d}")
        assert [one.drop for one in assigned] == [(number,)]
        stage.settle()
        assert held(stage) == [number + 1]


def test_worker_without_room_keeps_what_it_needs_and_takes_the_newest_when_that_has_ended() -> None:
    stage = stage_of(staleness__in_flight_batches=3.0)
    stage.worker("w0", slots=6, versions=2)
    kept = [name for name in stage.running() if name.startswith("g0000000002")]
    step(stage, "g0000000000")
    stage.settle()
    step(stage, "g0000000001")
    stage.settle()
    # g2 is of version 0, g3 of version 1, and version 2 is there.
    assert held(stage) == [0, 1]
    assert stage.state.version == 2
    assert stage.state.workers["w0"].target == 1
    assert kept and set(kept) <= set(stage.running())
    stage.finish_group("g0000000002")
    assigned = [one for one in stage.plan() if isinstance(one, Assign)]
    assert [(one.version, one.drop) for one in assigned] == [(2, (0,))]
    stage.settle()
    assert held(stage) == [1, 2]


def test_requests_of_a_lost_worker_are_placed_where_their_version_is_loaded_again() -> None:
    stage = stage_of()
    stage.worker("w0", slots=6, versions=3)
    step(stage, "g0000000000")
    stage.settle()
    versions = {stage.placed[name].spec.version for name in stage.running()}
    assert versions == {0, 1}
    stage.lose("w0")
    stage.settle()
    assert not stage.running()
    stage.worker("w1", slots=6, versions=3)
    assert held(stage, "w1") == [0, 1]
    assert {stage.placed[name].spec.version for name in stage.running("w1")} == {0, 1}
    assert stage.state.workers["w1"].target == 1


def test_worker_of_one_version_beside_one_of_several_is_assigned_when_it_is_empty() -> None:
    stage = stage_of()
    stage.worker("w0", slots=3, versions=3)
    stage.worker("w1", slots=3)
    assigned = step(stage, "g0000000000")
    assert [one.worker for one in assigned] == ["w0"]
    stage.settle()
    for name in stage.running("w1"):
        assert stage.placed[name].spec.version == stage.state.workers["w1"].target


def test_drained_worker_moves_requests_to_one_that_has_their_version_beside_others() -> None:
    stage = stage_of(staleness__in_flight_batches=2.0)
    stage.worker("w0", slots=2, versions=2, moves=True)
    stage.worker("w1", slots=8, versions=2, moves=True)
    stage.worker("w2", slots=8, versions=2, moves=True)
    step(stage, stage.placed[stage.running("w1")[0]].spec.group)
    stage.settle()
    (one, *_) = stage.running()
    name = stage.placed[one].worker
    stage.tell(records.command("drain", worker=name))
    moved = [one for one in stage.plan() if isinstance(one, Move)]
    assert moved
    for move in moved:
        version = stage.placed[move.trajectory].spec.version
        assert version in held(stage, move.to)
        stage.release(move.trajectory)
    stage.settle()
    assert {stage.placed[move.trajectory].worker for move in moved} == {m.to for m in moved}


def test_decisions_that_no_plan_contains_are_refused() -> None:
    stage = stage_of()
    stage.worker("w0", slots=6, versions=2)
    assigned = step(stage, "g0000000000")
    before = stage_of()
    before.worker("w0", slots=6, versions=2)
    before.finish_group("g0000000000")
    before.settle()
    before.commit()
    (whole,) = assigned
    needed = msgspec.structs.replace(whole, drop=(0,))
    with pytest.raises(InvariantBroken, match="has requests of what it is to drop"):
        apply_decision(before.state, needed)
    absent = msgspec.structs.replace(whole, drop=(7,))
    with pytest.raises(InvariantBroken, match="does not have what it is to drop"):
        apply_decision(before.state, absent)
    before.state.residents["w0"].most = 1
    with pytest.raises(InvariantBroken, match="no room"):
        apply_decision(before.state, whole)


def test_placement_under_a_version_that_the_worker_does_not_have_is_refused() -> None:
    stage = stage_of()
    stage.worker("w0", slots=6, versions=2)
    step(stage, "g0000000000")
    state = stage.state
    placed = [one for one in stage.decided if isinstance(one, Place)][-1]
    (name, request) = next(iter(state.requests.items()))
    state.residents["w0"].held = []
    with pytest.raises(InvariantBroken, match="another version"):
        apply_decision(state, placed)
    assert name and request


def test_worker_that_claims_too_many_versions_is_not_believed() -> None:
    stage = stage_of()
    stage.join("w0", versions=5000)
    stage.join("w1", versions=0)
    assert stage.state.workers == {}
    assert stage.state.counters.rejected == 2


def test_state_with_such_workers_comes_back_from_a_snapshot() -> None:
    stage = stage_of()
    stage.worker("w0", slots=6, versions=3)
    step(stage, "g0000000000")
    stage.settle()
    again = state_of(body_of(stage.state).joined())
    assert again.residents["w0"].held == [0, 1]
    assert again.digest() == stage.state.digest()
    stage.finish_group("g0000000001")
    again = state_of(body_of(stage.state).joined())
    assert plan(again) == plan(stage.state) != ()


def mixed(seed: int, *, all_share: bool = False) -> World:
    """The swarm's world of a seed, in which workers host several versions at once."""
    world = swarm(seed)
    chance = random.Random(f"residents {seed}")
    for name, player in world.players.items():
        player.versions = chance.choice((2, 3, 5) if all_share else (1, 2, 2, 3, 5))
        world.versions[name] = player.versions
    return world


def check_residents(state: State) -> None:
    """What holds of every state with such workers."""
    for worker in state.workers.values():
        versions = {
            state.groups[state.requests[name].group].spec.version for name in worker.requests
        }
        residence = state.residents.get(worker.name)
        if residence is None:
            assert versions <= {worker.hosted}, "C1"
            continue
        assert versions <= set(residence.held), "C1"
        assert residence.held == sorted(set(residence.held))
        assert len({*residence.held, worker.target} - {-1}) <= residence.most
        assert worker.loading or worker.target < 0 or worker.target in residence.held
    assert state.residents.keys() <= state.workers.keys()
    check_index(state)


@pytest.mark.parametrize("seed", range(20))
def test_run_with_such_workers_is_safe_under_faults_and_ends_when_they_stop(seed: int) -> None:
    world = mixed(seed, all_share=seed % 2 == 0)
    for _ in range(12):
        world.run(seconds=FAULTY_S / 12)
        check_residents(world.machine.state)
    finish(world)
    state = world.machine.state
    if not world.commands:
        assert state.counters.rejected == 0, state.counters.rejection
        assert max(state.counters.staleness) <= world.config.staleness.max_staleness
    found = recover(world.bus, world.topics)
    assert (found.state.digest(), found.state.chain) == (state.digest(), state.chain)


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 100))
def test_run_with_such_workers_is_safe_under_faults_at_length(seed: int) -> None:
    world = mixed(seed, all_share=seed % 2 == 0)
    world.run(seconds=FAULTY_S)
    check_residents(world.machine.state)
    finish(world)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.floats(0.5, 40.0), st.integers(0, 10**6))
def test_a_plan_leaves_nothing_to_plan(seed: int, seconds: float, shock: int) -> None:
    world = mixed(seed)
    world.run(seconds=seconds)
    state = copy.deepcopy(world.machine.state)
    if state.done:
        return
    assert plan(state) == (), "the machine has just planned"
    check_nothing_is_left(state, random.Random(shock), check_residents)


def test_run_with_such_workers_alone_moves_nothing_and_is_done_sooner() -> None:
    config = records.make_config(
        run__steps=30, groups__size=4, groups__per_step=4, staleness__max_staleness=2
    )
    took: dict[int, float] = {}
    for versions in (1, 4):
        names = {f"w{number}": (4, 1) for number in range(4)}
        world = World(seed=3, config=config, workers=names, versions=dict.fromkeys(names, versions))
        while not world.machine.state.done:
            world.run(seconds=0.5)
        took[versions] = world.clock.ns / 1e9
        assert world.ledger.moves == {}
    assert took[4] < took[1]
