"""`whatif` takes a run's hardware from its log and simulates it again.

The runs are worlds: production's machines in virtual time, on hardware whose speed is known.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.cli.app import app
from dora_pipe.cli.whatif import emit_answers
from dora_pipe.config.load import leaves
from dora_pipe.config.model import Config
from dora_pipe.core.errors import UsageError
from dora_pipe.sim.parts import Delays, PlainParts, WorkerPlan
from dora_pipe.sim.whatif import (
    CLUSTER_KEYS,
    KEYS,
    SCHEDULERS,
    Contention,
    Estimate,
    as_measured,
    check_question,
    delays_of,
    estimate,
    lengths_of,
    rewards_of,
)
from dora_pipe.sim.whatif_facts import Measured, SlotTime, Steps, TurnValues, measure, speed_of
from dora_pipe.sim.world import SECOND_NS, World
from tests.support import fork_stage
from tests.support.tiers import more

TOKEN_NS = 4_000_000
TRAIN_NS = 2_000_000_000


def config(**changes: Any) -> Config:
    """Fourteen steps of eight groups of four on two workers."""
    plain: dict[str, Any] = {
        "run": {"name": "w", "steps": 14, "seed": 7},
        "model": {"path": "m"},
        "task": {"kind": "arithmetic"},
        "groups": {"size": 4, "per_step": 16},
        "staleness": {"max_staleness": 1},
        "evaluation": {"prompts": 0},
        "bus": {"partitions": 2},
        "workers": {"count": 2, "slots": 8, "prefetch": 4, "context_tokens": 256},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        plain[section] = plain[section] | {name: value}
    return msgspec.convert(plain, Config)


def run_world(chosen: Config) -> Measured:
    """A run in virtual time, measured from its log."""
    plans = [
        WorkerPlan(
            name=f"w{one}",
            slots=chosen.workers.slots,
            prefetch=chosen.workers.prefetch,
            token_ns=TOKEN_NS,
            elastic=chosen.workers.is_elastic(f"w{one}"),
        )
        for one in range(chosen.workers.count)
    ]
    parts = PlainParts(delays=Delays(train_ns=TRAIN_NS))
    with World(chosen, workers=plans, parts=parts) as world:
        assert world.run(until_ns=4000 * SECOND_NS)
        with closing(read_catalogue(world.bus, world.topics)) as catalogue:
            return measure(world.bus, world.topics, catalogue)


@pytest.fixture(scope="module")
def measured() -> Iterator[Measured]:
    """The run that the tests ask about."""
    yield run_world(config())


def simulated(measured: Measured, chosen: Config) -> Estimate:
    """With these settings, on more cores than processes."""
    return estimate(measured, chosen, what="sim", cores=64)


def test_the_speed_of_engine_and_trainer_is_found(measured: Measured) -> None:
    assert measured.speed.t0_s == pytest.approx(TOKEN_NS / 1e9, rel=0.1)
    assert measured.speed.t1_s * 8 < measured.speed.t0_s * 0.1
    assert measured.speed.slower < 0.2
    assert measured.train_fixed_s == pytest.approx(TRAIN_NS / 1e9, rel=0.1)
    assert len(measured.steps) == 14
    assert measured.commands == measured.rejoined == 0


def test_the_run_as_it_was_is_reproduced(measured: Measured) -> None:
    was, again = as_measured(measured), simulated(measured, measured.config)
    assert again.wall_s == pytest.approx(was.wall_s, rel=0.15)
    assert again.staleness == pytest.approx(was.staleness, abs=0.25)


def test_what_values_of_turns_cost_is_said_and_not_modelled(
    measured: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    emit_answers(measured, [as_measured(measured)], 0.0, 2)
    assert "values of turns" not in capsys.readouterr().out
    cost = TurnValues(tokens=3000, trained=1200, share=0.5, samples=4)
    emit_answers(replace(measured, turn_values=cost), [as_measured(measured)], 0.0, 2)
    out = capsys.readouterr().out
    assert "3,000 tokens, 2.50 for each that was trained (share 0.5, 4 samples)" in out
    assert "not in the model: values of turns" in out


@pytest.mark.parametrize(
    "changes",
    [
        {"staleness__max_staleness": 0},
        {"workers__elastic": 1},
        *more([{"workers__count": 1}, {"workers__slots": 4}]),
    ],
    ids=str,
)
def test_another_setting_is_foretold(measured: Measured, changes: dict[str, int]) -> None:
    """The same world with the other setting is what really happens."""
    chosen = config(**changes)
    happened = as_measured(run_world(chosen))
    predicted = simulated(measured, chosen)
    assert predicted.wall_s == pytest.approx(happened.wall_s, rel=0.2)
    ratio = happened.wall_s / as_measured(measured).wall_s
    again = simulated(measured, measured.config)
    assert predicted.wall_s / again.wall_s == pytest.approx(ratio, rel=0.15)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_has_an_answer(measured: Measured, scheduler: Any) -> None:
    found = estimate(measured, measured.config, what=scheduler, cores=64, scheduler=scheduler)
    assert found.wall_s >= 14 * TRAIN_NS / 1e9
    assert found.staleness <= 1


def test_an_interruptible_run_is_foretold_without_versions_on_workers(measured: Measured) -> None:
    found = simulated(measured, config(staleness__interruptible=True))
    assert found.moves == 0
    assert found.wall_s <= simulated(measured, measured.config).wall_s


OTHER = {"size": 2, "prompts": -1, "max_staleness": 3, "in_flight_batches": 1.5}
"""Values for those keys that are numbers to somebody."""


@pytest.mark.parametrize("scheduler", ["production", "drop"])
def test_every_key_is_known_to_the_model_or_refused_by_name(
    measured: Measured, scheduler: Any
) -> None:
    before = config()
    known = CLUSTER_KEYS if scheduler == "production" else KEYS
    for key in set(leaves(before)) - {"run.name", "model.path"}:
        now = differing(before, key)
        if key in known:
            check_question(measured, before, now, scheduler=scheduler)
        else:
            with pytest.raises(UsageError, match=f"^{key}: the model does not know it") as caught:
                check_question(measured, before, now, scheduler=scheduler)
            assert "it knows" in str(caught.value.hint), key


def differing(section: Any, key: str) -> Any:
    """This section with another value under one key, whatever sense it makes."""
    name, _, inner = key.partition(".")
    value = differing(getattr(section, name), inner) if inner else OTHER.get(name, "another")
    changed = copy.copy(section)
    msgspec.structs.force_setattr(changed, name, value)  # `replace` would fill in defaults
    return changed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups__size": 16}, "groups.size: the log has groups of 4"),
        ({"evaluation__prompts": 64}, "evaluation.prompts: the log has the lengths of 0"),
    ],
)
def test_lengths_that_no_log_has_are_refused(
    measured: Measured, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_question(measured, config(), config(**changes))


def test_a_run_that_is_too_short_says_so() -> None:
    with pytest.raises(UsageError, match="2 committed steps"):
        run_world(config(run__steps=2))


def in_slot(name: str, start_s: float, end_s: float) -> SlotTime:
    times = {"placed_s": start_s, "start_s": start_s, "end_s": end_s, "after_s": 0.0}
    return SlotTime(trajectory=name, worker="w", tokens=100, **times)


def test_a_regression_finds_what_made_the_times() -> None:
    """Ten requests side by side, then one alone; twice as slow while a step trains."""
    beside = [in_slot(f"a{one}", 0.0, 2.0) for one in range(10)]
    alone, trained = in_slot("b", 10.0, 11.1), in_slot("c", 20.0, 22.2)
    found = speed_of([*beside, alone, trained], [(19.0, 23.0)])
    assert found.t0_s == pytest.approx(0.010, rel=0.05)
    assert found.t1_s == pytest.approx(0.001, rel=0.05)
    assert found.slower == pytest.approx(1.0, abs=0.05)
    assert found.r2 > 0.99


def test_a_step_function_has_the_mean_of_its_pieces() -> None:
    steps = Steps([(0.0, 2.0), (4.0, -1.0)])
    assert steps.mean(0.0, 4.0) == 2.0
    assert steps.mean(2.0, 6.0) == 1.5
    assert steps.integral(-1.0) == 0.0


def test_shared_cores_slow_everything_down() -> None:
    shared = Contention(cores=2, trainer=1.0, workers=2, busy_training=2.0)
    assert shared.slower(2, False) == 1.0
    assert shared.slower(2, True) == 1.5
    assert shared.slower(4, False) == 2.0
    assert shared.while_training == 1.5


def test_beyond_what_was_measured_it_is_measured_over_again() -> None:
    lengths = lengths_of({(0, 0): 5, (0, 1): 6, (1, 0): 7, (1, 1): 8, (2, 0): 9}, 2)
    assert lengths(1) == (7, 8)
    assert lengths(2) == (5, 6)
    reward = rewards_of({(0, 0): 1.0, (1, 0): None})
    assert reward(2, 0) == 1.0
    assert sorted({delays_of([0.1, 0.2])(one, 0) for one in range(4)}) == [0.1, 0.2]


def test_an_unknown_paradigm_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["whatif", "none", "--paradigm", "magic"])
    assert isinstance(result.exception, UsageError)
    assert "magic" in result.exception.message


def test_turns_of_episodes_are_times_in_slots_and_their_environment_is_waited_for(
    tmp_path: Path,
) -> None:
    run = fork_stage.record(tmp_path / "episodes", fork_stage.Puzzles, run__steps=5)
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        measured = measure(bus, run.topics, tables)
        many = len(measured.lengths)
    assert measured.speed.t0_s > 0 and measured.speed.r2 > 0.9
    assert len(measured.reports_s) >= 0.9 * many  # One of an episode, however many turns it has.
    again = estimate(measured, measured.config, what="again", cores=8)
    assert again.wall_s == pytest.approx(measured.wall_s, rel=0.3)
