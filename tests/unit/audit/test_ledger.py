"""Tests of the ledger on runs of the real orchestrator with faults.

It must report nothing, count the orchestrator's records and give each group one outcome.
"""

from __future__ import annotations

from collections import Counter

import pytest

from dora_pipe.audit.check_fold import FoldCheck
from dora_pipe.audit.effective_config import EffectiveConfig
from dora_pipe.audit.findings import Findings
from dora_pipe.audit.ledger import Ledger
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.schemas.control import Command, StepCommitted, decode_control
from tests.support.ledgers import build_ledger, folded_rounds
from tests.support.orchestrator_records import make_config
from tests.support.orchestrator_world import Chances, World

FAULTS = Chances(
    invalid=0.05,
    failure=0.05,
    crash=0.02,
    freeze=0.02,
    refusal=0.1,
    trainer_restart=0.1,
    restart=0.05,
    equal_rewards=0.1,
)
WORKERS = {"w0": (4, 1), "w1": (3, 2), "w2": (2, 0)}


def _world(seed: int, chances: Chances = FAULTS) -> World:
    config = make_config(
        rollout__prompts_per_step=1 + seed % 3,
        rollout__group_size=2 + seed % 3,
        rollout__filter_zero_advantage=bool(seed % 2),
        staleness__max_staleness=seed % 4,
        run__steps=10,
        evaluation__prompts=2,
        evaluation__group_size=2,
        evaluation__every=3,
    )
    return World(seed=seed, config=config, workers=WORKERS, chances=chances)


def _read(world: World) -> tuple[Ledger, FoldCheck]:
    ledger = Ledger(world.topics.run, Findings())
    fold = FoldCheck(ledger.findings)
    for turn in folded_rounds(world.bus, world.topics, ledger.findings):
        ledger.apply(turn)
        fold.fold(turn)
    return ledger, fold


def _lines(ledger: Ledger) -> list[str]:
    return [violation.line for violation in ledger.findings.violations]


@pytest.mark.parametrize("seed", range(12))
def test_books_of_a_run_with_faults_balance(seed: int) -> None:
    world = _world(seed)
    world.run(seconds=1e5)
    ledger, fold = _read(world)
    state = world.machine.state
    assert state.done
    assert _lines(ledger) == []
    outcomes = Counter(group.outcome for group in ledger.accounts.groups.values())
    assert outcomes == state.counters.outcomes
    assert outcomes.total() == state.ordinal + state.eval_ordinal
    assert not ledger.accounts.open
    assert fold.state is not None
    assert fold.state.digest() == state.digest()
    assert fold.state.chain == state.chain


def test_living_run_holds_whenever_it_is_looked_at() -> None:
    world = _world(4)
    looks = 0
    while not world.machine.finished:
        world.run(seconds=3.0)
        ledger, _ = _read(world)
        assert _lines(ledger) == []
        looks += 1
    assert looks > 5


def test_late_records_of_a_fenced_worker_are_fenced() -> None:
    world = _world(2, Chances(freeze=0.1))
    world.run()
    ledger, _ = _read(world)
    fenced = [fact for fact in ledger.accounts.logged.values() if fact.status == "fenced"]
    assert fenced
    for element in fenced:
        worker = ledger.accounts.workers[element.fact.incarnation]
        assert worker.departure == "fenced"
        assert element.offset > worker.incarnation
        entry = ledger.accounts.request(element.fact.trajectory)
        assert entry is not None
        assert entry.bound is not element


def test_command_to_fail_a_batch_ends_only_the_one_it_names() -> None:
    legality = Ledger("r", Findings()).legality
    legality.in_force = EffectiveConfig(make_config())

    def training_after(**args: int) -> tuple[int, int] | None:
        legality.bound.training = (3, 1)
        legality.command(Command(at_ns=0, user="u", verb="fail-batch", args=dict(args)))
        return legality.bound.training

    assert training_after(step=2) == (3, 1)
    assert training_after(step=3) is None
    assert training_after() is None


def test_refused_batches_are_told_with_their_reason() -> None:
    world = _world(2, Chances(refusal=0.4))
    world.run()
    ledger, _ = _read(world)
    refused = [entry for entry in ledger.not_trained if "refused" not in entry.why]
    assert refused
    failed = [group for group in ledger.accounts.groups.values() if group.outcome == "failed"]
    assert len(failed) >= len(refused)
    assert all("unreadable" in group.why for group in failed)


@pytest.mark.parametrize(
    "command",
    [
        Command(at_ns=0, user="u", verb="set", args={"staleness.max_staleness": 3}),
        Command(at_ns=0, user="u", verb="set", args={"staleness.max_staleness": 0}),
        Command(at_ns=0, user="u", verb="set", args={"run.steps": 6}),
        Command(at_ns=0, user="u", verb="stop"),
        Command(at_ns=0, user="u", verb="stop", args={"now": True}),
        Command(at_ns=0, user="u", verb="fail-batch"),
        Command(at_ns=0, user="u", verb="drain", args={"worker": "w1"}),
        Command(at_ns=0, user="u", verb="unknown verb"),
    ],
    ids=lambda command: f"{command.verb}-{len(command.args)}",
)
@pytest.mark.parametrize("seed", [1, 2, 6])
def test_commands_of_users_are_followed(
    seed: int, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = _world(seed, Chances(train_s=2.0))
    # The world's own ledger knows no commits that do not count.
    monkeypatch.setattr(world.ledger, "_end", lambda group, outcome: None)
    for seconds in (4.0, 9.0):
        world.after(seconds, lambda: None if world.machine.finished else _tell(world, command))
    world.run()
    assert world.machine.state.done
    ledger, _ = _read(world)
    assert _lines(ledger) == []
    assert ledger.commands
    in_force = ledger.legality.in_force
    assert in_force is not None
    assert in_force.config == world.machine.state.config
    assert in_force.steps == world.machine.state.steps


def _tell(world: World, command: Command) -> None:
    world.tell(command)


def test_commit_that_lost_the_race_with_fail_batch_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = _world(1, Chances(train_s=2.0))
    monkeypatch.setattr(world.ledger, "_end", lambda group, outcome: None)
    raced: list[int] = []

    def fail_while_training() -> None:
        training = world.machine.state.training
        if training is None or raced:
            world.after(0.1, fail_while_training)
            return
        raced.append(training.step)
        world.tell(Command(at_ns=0, user="u", verb="fail-batch"))

    world.after(3.0, fail_while_training)
    world.run()
    ledger, _ = _read(world)
    assert _lines(ledger) == []
    (attempted,) = ledger.not_trained
    assert attempted.step == raced[0]
    assert "after its batch had ended" in attempted.why
    assert list(ledger.steps) == list(range(10))
    commits = [fact for fact in _facts(world) if isinstance(fact, StepCommitted)]
    assert [commit.step for commit in commits].count(raced[0]) == 2


def _facts(world: World) -> list[object]:
    records = records_of(world.bus, ends_of(world.bus, world.topics.control))
    return [decode_control(record.value) for record in records]


def test_ledger_alone_is_built_in_one_call() -> None:
    world = _world(3)
    world.run()
    ledger = build_ledger(world.bus, world.topics)
    assert len(ledger.steps) == 10
    assert ledger.version == 10
    assert ledger.serving.seconds > 0
    assert ledger.findings.total == 0


def test_incarnation_that_was_replaced_before_its_lease_ended_hosts_nothing_any_more() -> None:
    world = _world(1, Chances(crash=0.05, away_s=2.0))
    world.run(seconds=1e5)
    ledger, _ = _read(world)
    workers = ledger.accounts.workers
    assert len(workers) > len(WORKERS)
    assert not any(workers[incarnation].departure for incarnation in ledger.serving.hosts)
