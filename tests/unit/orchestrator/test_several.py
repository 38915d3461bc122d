"""Several tasks in their ratios, each with a cursor of its own, and several evaluations."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config.model import Evaluation
from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.recovery import recover
from dora_pipe.orchestrator.snapshots import body_of, state_of
from dora_pipe.schemas.identity import next_task, prompt_index, whole_shares
from dora_pipe.schemas.rounds import GroupSpec
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage
from tests.support.orchestrator_world import Chances, World

RATIO = st.one_of(
    st.integers(1, 9).map(float), st.floats(0.01, 100.0).map(lambda value: round(value, 2))
)


@given(st.lists(RATIO, min_size=1, max_size=7), st.integers(1, 200))
def test_after_any_number_of_groups_each_task_has_had_its_share_to_within_one(
    ratios: list[float], groups: int
) -> None:
    shares, given_ = whole_shares(tuple(ratios)), [0] * len(ratios)
    for number in range(1, groups + 1):
        given_[next_task(shares, given_)] += 1
        for share, count in zip(shares, given_, strict=True):
            assert abs(count - Fraction(number * share, sum(shares))) < 1


def test_ratios_are_taken_as_they_are_written() -> None:
    assert whole_shares((0.1, 0.3)) == (1, 3)
    assert whole_shares((2.0, 4.0)) == (1, 2)
    assert whole_shares((0.7,)) == (1,)


def faulty(seed: int, ratios: dict[str, float]) -> World:
    """A run of these tasks whose roles die, over."""
    config = records.make_config(
        run__steps=20, groups__per_step=5, staleness__max_staleness=2, groups__attempts_max=5
    )
    evaluations = (
        Evaluation(name="often", prompts=2, every=2, task="b"),
        Evaluation(name="ends", prompts=3, siblings=2),
        Evaluation(name="never", prompts=0),
    )
    world = World(
        seed=seed,
        config=records.with_several(config, ratios, evaluations),
        workers={"w0": (4, 2), "w1": (3, 0)},
        chances=Chances(invalid=0.1, crash=0.03, restart=0.1, trainer_restart=0.05),
    )
    world.run(seconds=60.0)
    world.heal()
    world.run(seconds=5000.0)
    assert world.machine.state.done
    return world


def dispatched(world: World, purpose: str) -> list[GroupSpec]:
    """In the order of their ordinals."""
    found = [one for one in world.ledger.specs.values() if one.purpose == purpose]
    return sorted(found, key=lambda one: one.ordinal)


@pytest.mark.parametrize("seed", range(3))
def test_ratios_and_cursors_are_exact_across_crashes_and_restarts(seed: int) -> None:
    world, had = faulty(seed, {"a": 3.0, "b": 1.0}), Counter[str]()
    specs = dispatched(world, "train")
    facts = world.machine.state.facts
    assert facts is not None and len(specs) > 100
    for number, spec in enumerate(specs):
        data = facts.datasets[spec.source]
        assert spec.dataset_digest == data.digest
        cursor = prompt_index(facts.seed, had[spec.task], data.rows)
        assert (spec.data_epoch, spec.index) == cursor
        had[spec.task] += 1
        assert abs(had["a"] - Fraction(3 * (number + 1), 4)) < 1
    assert world.machine.state.drawn == had


def test_evaluations_come_at_their_own_periods_each_with_its_task_and_siblings() -> None:
    specs = dispatched(faulty(1, {"a": 3.0, "b": 1.0}), "eval")
    found = Counter((one.evaluation, one.version, one.task, one.size) for one in specs)
    often = {("often", version, "b", 1): 2 for version in range(0, 21, 2)}
    assert found == Counter(often | {("ends", version, "a", 2): 3 for version in (0, 20)})
    assert {one.dataset_digest for one in specs} == {
        records.data_of("eval/often"),
        records.data_of("eval/ends"),
    }


def test_state_with_tasks_comes_back_from_a_snapshot_and_from_the_log() -> None:
    world = faulty(2, {"a": 1.0, "b": 2.5, "c": 0.5})
    state = world.machine.state
    assert state.digest() == digest_of(state) == state_of(body_of(state).joined()).digest()
    assert recover(world.bus, world.topics).state.digest() == state.digest()


def test_a_run_without_the_rows_of_a_task_does_not_start() -> None:
    stage = Stage()
    config = records.with_several(records.make_config(), {"a": 1.0, "b": 1.0})
    started = records.run_started(config)
    del started.datasets["train/b"]
    stage.tell(started)
    assert "no rows of train/b are said" in stage.state.counters.rejection
    assert stage.state.facts is None
