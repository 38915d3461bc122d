"""Tests of entire runs in virtual time: safe under faults, live after them.

The real machine runs against seeded players (`tests/support/orchestrator_world.py`), also with
several versions per worker and colocated workers. A failing seed is in the test's name.
"""

from __future__ import annotations

import copy
import random
from typing import Literal, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.orchestrator.apply_control import apply_control, read_control
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.entities import OPEN_TIMES
from dora_pipe.orchestrator.fold import apply_observation, close_round
from dora_pipe.orchestrator.index import queue_key
from dora_pipe.orchestrator.moving import MOVES_MAX
from dora_pipe.orchestrator.planner import decide
from dora_pipe.orchestrator.process.recovery import read_rounds, recover
from dora_pipe.orchestrator.snapshots import body_of, state_of
from dora_pipe.orchestrator.staleness import feasible
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.rounds import LeaseExpired
from tests.support import orchestrator_records as records
from tests.support.orchestrator_world import Chances, World

FAULTY_S = 60.0
"""Virtual seconds with faults."""
CALM_S = 5000.0
"""Virtual seconds without faults after which a run counts as hung."""

Workers = Literal["plain", "colocated", "resident"]
KINDS: tuple[Workers, ...] = get_args(Workers)


def swarm(seed: int, kind: Workers = "plain") -> World:
    chance = random.Random(seed)
    eta = chance.randrange(4)
    size = chance.randrange(1, 5)
    config = records.make_config(
        run__steps=chance.randrange(3, 12),
        run__seed=seed,
        rollout__group_size=size,
        rollout__prompts_per_step=chance.randrange(1, 5),
        rollout__min_valid_trajectories=min(size, chance.randrange(1, 3)),
        rollout__filter_zero_advantage=size > 1 and chance.random() < 0.3,
        rollout__max_attempts=chance.choice([2, 3, 5]),
        staleness__max_staleness=eta,
        staleness__async_batches=chance.choice([None, 1.0, 1.0 + eta * chance.random()]),
        evaluation__prompts=chance.choice([0, 0, 2, 3]),
        evaluation__every=chance.choice([0, 1, 2]),
        evaluation__group_size=chance.randrange(1, 3),
    )
    workers = {
        f"w{number}": (chance.randrange(1, 7), chance.randrange(0, 3))
        for number in range(chance.choice([1, 2, 3, 4, 8]))
    }
    chances = Chances(
        invalid=chance.choice([0, 0, 0.1]),
        failure=chance.choice([0, 0, 0.1]),
        crash=chance.choice([0, 0.01, 0.05]),
        freeze=chance.choice([0, 0.01, 0.03]),
        refusal=chance.choice([0, 0, 0.2]),
        trainer_restart=chance.choice([0, 0.1]),
        restart=chance.choice([0, 0, 0.1]),
        command=chance.choice([0, 0, 0.2]),
        token_s=chance.choice([0.01, 0.1, 0.5]),
        train_s=chance.choice([0.2, 3.0]),
        load_s=chance.choice([0.1, 2.0]),
        equal_rewards=chance.choice([0, 0.3]),
        moves=chance.random() < 0.7,
        release_s=chance.choice([0.05, 0.3, 3.0]),
        kv_tokens=chance.choice([0, 0, 300]),
        score_s=chance.choice([0, 0, 4.0]),
    )
    colocated = frozenset(sorted(workers)[:: 1 + seed % 3]) if kind == "colocated" else frozenset()
    versions = {name: chance.choice((1, 2, 3, 5)) for name in workers if kind == "resident"}
    return World(
        seed=seed,
        config=config,
        workers=workers,
        chances=chances,
        versions=versions,
        colocated=colocated,
    )


def check_state(state: State) -> None:
    assert state.config is not None
    entry = state.standing()
    u = [g for g in state.groups.values() if g.phase in ("generating", "finished")]
    u = [g for g in u if g.spec.purpose == "train"]
    counted = {g.spec.deadline: 0 for g in u}
    for group in u:
        counted[group.spec.deadline] += 1
    assert state.deadlines == counted
    assert feasible(state.deadlines, entry.step, entry.per_step)
    assert state.finished == sorted(g.key for g in u if g.phase == "finished")
    queued = [name for name, request in state.requests.items() if not request.worker]
    keys = {
        name: queue_key(state.groups[state.requests[name].group].spec, state.requests[name].sample)
        for name in queued
    }
    assert sorted(key for queue in state.queues.values() for key in queue) == sorted(keys.values())
    for worker in state.workers.values():
        mine = {
            n
            for n, r in state.requests.items()
            if (r.worker, r.incarnation) == (worker.name, worker.incarnation)
        }
        here = (worker.name, worker.incarnation)
        assert worker.leaving == sum(state.requests[name].moving is not None for name in mine)
        assert worker.arriving == sum(r.moving == here for r in state.requests.values())
        assert worker.requests == mine
        assert 0 <= worker.off_engine <= len(mine)
        held = len(mine) + worker.arriving
        assert held <= OPEN_TIMES * (worker.slots + worker.prefetch)
        versions = {state.groups[state.requests[name].group].spec.version for name in mine}
        residence = state.residents.get(worker.name)
        if residence is None:
            assert versions <= {worker.served} or (worker.colocated and not worker.awake), "C1"
        else:
            assert versions <= set(residence.held), "C1"
            assert residence.held == sorted(set(residence.held))
            assert len({*residence.held, worker.target} - {-1}) <= residence.most
    waiting = {n for n, r in state.requests.items() if r.moving is not None and not r.worker}
    assert set(state.released) == waiting
    check_index(state)
    assert set(state.policies) == {*state.pins, state.version}
    assert sum(state.pins.values()) == len(state.groups)
    assert state.digest() == digest_of(state)


def check_index(state: State) -> None:
    index, workers = state.index, state.workers.values()
    usable = [worker for worker in workers if worker.usable]
    assert index.hosts.keys() == {worker.target for worker in usable}
    for version, hosts in index.hosts.items():
        here = {worker.name: worker for worker in usable if worker.target == version}
        assert hosts.workers == here
        assert hosts.slots == sum(worker.slots for worker in here.values())
        assert hosts.load == sum(entry.load for entry in here.values())
        assert hosts.free == sum(entry.free for entry in here.values())
        open_ = [entry for entry in here.values() if entry.open]
        best = min(
            open_, key=lambda worker: (worker.load - worker.slots, worker.name), default=None
        )
        assert hosts.roomiest() is best
    idle = [
        worker for worker in usable if not (worker.requests or worker.arriving or worker.loading)
    ]
    emptying = [
        worker for worker in usable if worker.requests and not worker.present and worker.target >= 0
    ]
    for result, expected in (
        (index.idle, idle),
        (index.emptying, emptying),
        (index.colocated, [worker for worker in workers if worker.colocated]),
    ):
        assert result == {entry.name: entry for entry in expected}
    running = sorted(group.key for group in state.groups.values() if group.phase == "generating")
    due: dict[int, list[str]] = {}
    for key in running:
        if state.groups[key.group].spec.purpose == "train":
            due.setdefault(key.deadline, []).append(key.group)
    assert {deadline: list(names) for deadline, names in index.generating.items()} == due


def finish(world: World) -> None:
    world.heal()
    world.run(seconds=CALM_S)
    assert world.machine.state.done, f"seed {world.seed}: {world.machine.state.counters}"
    world.ledger.check_end()
    most = MOVES_MAX + world.commands  # Each command may drain a worker.
    assert max(world.ledger.moves.values(), default=0) <= most


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_run_is_safe_under_faults_and_ends_when_they_stop(kind: Workers, seed: int) -> None:
    world = swarm(seed, kind)
    world.run(seconds=FAULTY_S)
    check_state(world.machine.state)
    finish(world)
    state = world.machine.state
    if not world.commands:
        assert state.counters.rejected == 0, state.counters.rejection
        assert max(world.ledger.staleness) <= world.config.staleness.max_staleness
    recovery = recover(world.bus, world.topics)
    assert (recovery.state.digest(), recovery.state.chain) == (state.digest(), state.chain)


def shake(state: State, chance: random.Random) -> None:
    for name, worker in sorted(state.workers.items()):
        if chance.random() < 0.4:
            apply_observation(state, LeaseExpired(worker=name, incarnation=worker.incarnation))
    offset = state.control_next + 1000
    for number in range(chance.randrange(3)):
        joined = records.joined(f"x{number}", slots=chance.randrange(1, 6), prefetch=2)
        apply_control(state, offset + number, joined)
    eta = chance.randrange(4)
    for number, command in enumerate(
        (
            records.command("stop", now=chance.random() < 0.5),
            records.command("drain"),
            records.command("set", staleness__max_staleness=eta),
        ),
        offset + 10,
    ):
        if chance.random() < 0.2:
            apply_control(state, number, command)


@settings(max_examples=60)
@given(st.sampled_from(KINDS), st.integers(0, 10**6), st.floats(0.5, 40.0), st.integers(0, 10**6))
def test_a_plan_leaves_nothing_to_plan(
    kind: Workers, seed: int, seconds: float, shock: int
) -> None:
    world = swarm(seed, kind)
    world.run(seconds=seconds)
    state = copy.deepcopy(world.machine.state)
    if state.done:
        return
    assert decide(copy.deepcopy(state)) == [], "the machine has just planned"
    shake(state, random.Random(shock))
    for _ in range(4):
        before = copy.deepcopy(state)
        decisions = decide(state)
        assert decide(state) == []
        state.trigger = "looked at once more"
        assert decide(state) == [], "nor does the same trigger find anything the second time"
        check_state(state)
        assert decisions == decide(copy.deepcopy(before)), "equal states, equal plans"
        for decision in decisions:
            apply_decision(before, decision)
        before.trigger = ""
        assert before.digest() == state.digest()
        for worker in list(state.workers.values()):
            if worker.loading:
                ready = records.ready(worker.name, worker.incarnation, worker.target, worker.digest)
                apply_control(state, 10**9, ready)


@pytest.mark.parametrize("kind", KINDS)
def test_digest_that_is_kept_in_step_and_snapshots_hold_after_every_change(kind: Workers) -> None:
    world, state = swarm(7, kind), State()
    world.run(seconds=FAULTY_S)
    finish(world)
    for logged_round in read_rounds(world.bus, world.topics):
        again = state_of(b"".join(body_of(state).pieces()))
        for element in (state, again):
            for record in logged_round.control:
                apply_control(element, record.offset, read_control(record.value))
                assert element.digest() == digest_of(element), record
            for observation in logged_round.round.observations:
                apply_observation(element, observation)
            element.now_ns = logged_round.round.now_ns
        if logged_round.round.planned:
            for element in (state, again):
                assert tuple(decide(copy.deepcopy(element))) == logged_round.round.decisions
        for element in (state, again):
            for decision in logged_round.round.decisions:
                apply_decision(element, decision)
                assert element.digest() == digest_of(element), decision
            close_round(element, logged_round.round)
        assert again.digest() == state.digest()
    assert state.rounds > 40


def test_memory_does_not_grow_with_the_run() -> None:
    config = records.make_config(run__steps=60, rollout__prompts_per_step=2)
    world = World(seed=1, config=config, workers={"w0": (4, 0), "w1": (4, 0)})
    most = 0
    while not world.machine.state.done:
        world.run(seconds=2.0)
        state = world.machine.state
        most = max(most, len(state.groups) + len(state.requests) + len(state.policies))
    assert world.machine.state.counters.outcomes["trained"] == 120
    assert most < 30
