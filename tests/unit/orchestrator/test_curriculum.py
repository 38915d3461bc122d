"""Rows by a user's weights and by how often they were solved: a function of the state alone."""

from __future__ import annotations

import copy
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config.model import Config
from dora_pipe.core.errors import ConfigError, InvariantBroken
from dora_pipe.orchestrator import curriculum
from dora_pipe.orchestrator.apply_decision import apply_decision, next_training_row, train_spec
from dora_pipe.orchestrator.curriculum import HELD_BATCHES, NextRow, Samplers, Weigh
from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.fold import fold_decisions, fold_inputs
from dora_pipe.orchestrator.planner import decide
from dora_pipe.orchestrator.recovery import read_rounds, recover
from dora_pipe.orchestrator.rows import RECENT_MAX, UNSEEN, RowStats, Weights
from dora_pipe.orchestrator.snapshots import body_of, state_of
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.identity import prompt_index
from dora_pipe.schemas.rounds import Dispatch
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage
from tests.support.orchestrator_world import Chances, World

ROWS = 10
SAMPLER = "mine:weights"


def halves(rows: Sequence[RowStats], version: int) -> list[float]:
    """Most of all what is solved half of the time."""
    return [row.mean * (1 - row.mean) + 0.05 if row.groups else 0.25 for row in rows]


def samplers_of(weigh: Weigh) -> Samplers:
    return Samplers(functions={SAMPLER: weigh}, sources={SAMPLER: "sha"})


@pytest.fixture(autouse=True)
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is solved by its last group alone."""
    for module in ("orchestrator.curriculum", "audit.row_ledger"):
        monkeypatch.setattr(f"dora_pipe.{module}.SOLVED_GROUPS", 1)


def stage_of(weigh: Weigh | None = None, **changes: Any) -> Stage:
    """A run of ten rows on one worker, with its first groups running."""
    if weigh is not None:
        changes["task__sampler"] = SAMPLER
    stage = Stage(**{"run__steps": 30, **changes})
    stage.samplers = weigh and samplers_of(weigh)
    stage.begin(rows=ROWS).worker("w0", slots=8)
    return stage


def play(stage: Stage, reward_of: Callable[[int], float], steps: int = 1) -> list[Dispatch]:
    """Train so many steps, each row rewarded so; what was dispatched meanwhile."""
    before, last = len(stage.decided), stage.state.version + steps
    while stage.state.version < last:
        while stage.state.training is None:
            for name in stage.running():
                group = stage.state.groups[stage.state.requests[name].group]
                stage.finish(name, reward=reward_of(group.spec.index))
            stage.settle()
        stage.commit()
        stage.settle()
    return [one for one in stage.decided[before:] if isinstance(one, Dispatch)]


def even(index: int) -> float:
    return float(index % 2 == 0)


def test_solved_rows_are_skipped_in_their_turn_and_named() -> None:
    stage = stage_of(task__drop_solved=1.0)
    found = play(stage, even, steps=14)
    late = found[-8:]
    assert all(one.spec.index % 2 for one in late) and any(one.skipped for one in late)
    assert all(row % 2 == 0 for one in found for row in one.skipped)
    order = [row for one in dispatched(stage) for row in (*one.skipped, one.spec.index)]
    assert order == [prompt_index(7, place, ROWS)[1] for place in range(len(order))]
    assert stage.state.curricula["train"].passed == sum(len(one.skipped) for one in found)


def dispatched(stage: Stage) -> list[Dispatch]:
    return [one for one in stage.decided if isinstance(one, Dispatch)]


def test_where_every_row_is_solved_the_run_goes_on_with_all_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("orchestrator.curriculum", "audit.row_ledger"):
        monkeypatch.setattr(f"dora_pipe.{module}.SOLVED_GROUPS", 2)
    stage = stage_of(task__drop_solved=0.5)
    late = play(stage, lambda index: 1.0, steps=16)[-10:]
    assert all(not one.skipped and one.reason.endswith("solved, as all are") for one in late)
    assert {one.spec.index for one in late} == set(range(ROWS))


def test_what_groups_have_come_to_counts_from_the_next_version_on() -> None:
    stage = stage_of(task__drop_solved=1.0, groups__per_step=1)
    index = stage.state.groups["g0000000000"].spec.index
    stage.finish_group("g0000000000")
    assert [(one.index, one.reward) for one in stage.state.curricula["train"].held] == [(index, 1)]
    assert not stage.state.rows
    stage.settle()
    stage.commit()
    assert stage.state.rows[f"train#{index}"] == UNSEEN.and_group(1.0, 0)
    assert not stage.state.curricula["train"].held


def test_without_a_commit_it_counts_when_some_batches_of_it_wait() -> None:
    stage = stage_of(
        task__drop_solved=1.0,
        groups__filter_zero_advantage=True,
        groups__failed_share_max=1.0,
    )
    for _ in range(ROWS * HELD_BATCHES):
        for name in stage.running():
            stage.finish(name)
        stage.settle()
        held = stage.state.curricula["train"].held
        assert len(held) < HELD_BATCHES * stage.config.groups.per_step
    assert stage.state.version == 0 and len(stage.state.rows) == ROWS


def test_groups_that_fail_are_not_counted() -> None:
    stage = stage_of(task__drop_solved=0.0)
    for name in stage.running():
        stage.finish(name, reward=None)
    assert not stage.state.curricula


def test_rows_are_drawn_by_the_weights_of_a_users_function() -> None:
    stage = stage_of(lambda rows, version: [float(index == version % 3) for index in range(ROWS)])
    found = [*dispatched(stage), *play(stage, even, steps=6)]
    assert {(one.spec.index, one.spec.version % 3) for one in found} == {(0, 0), (1, 1), (2, 2)}
    assert [one.spec.data_epoch for one in found] == [place // ROWS for place in range(len(found))]


def test_what_is_solved_half_of_the_time_comes_most() -> None:
    stage = stage_of(halves)
    turn = Counter[int]()

    def reward(index: int) -> float:
        turn[index] += 1
        return float(turn[index] // 2 % 2) if index < 3 else float(index % 2)

    late = Counter(one.spec.index for one in play(stage, reward, steps=28)[20:])
    assert sum(late[index] for index in range(3)) > 2 / 3 * late.total()


def test_solved_rows_are_not_drawn_unless_nothing_else_has_a_weight() -> None:
    weigh: list[float] = [1.0] * ROWS
    stage = stage_of(lambda *_: weigh, task__drop_solved=1.0)
    late = play(stage, even, steps=25)[-10:]
    assert all(one.spec.index % 2 for one in late)
    weigh[:] = [float(index % 2 == 0) for index in range(ROWS)]
    found = play(stage, even, steps=3)[-2:]
    assert all(one.spec.index % 2 == 0 and "is solved" in one.reason for one in found)


def wrong(rows: Sequence[RowStats], version: int) -> list[float]:
    raise KeyError("hard")


@pytest.mark.parametrize(
    ("weigh", "why"),
    [
        (wrong, "KeyError: 'hard'"),
        (lambda rows, _: [1.0 for _ in rows[1:]], "19 weights for 20 rows"),
        (lambda rows, _: [0.0 for _ in rows], "or all are 0"),
        (lambda rows, _: [1.0 for _ in rows[1:]] + [float("nan")], "not finite"),
        (lambda rows, _: [1.0 for _ in rows[1:]] + [float("inf")], "not finite"),
        (lambda rows, _: [2.0 for _ in rows[1:]] + [-1.0], "not finite numbers >= 0"),
        (lambda rows, _: ["a" for _ in rows], "could not convert"),
        (lambda rows, _: None, "not iterable"),
    ],
)
def test_weights_that_are_none_are_said_in_one_line_and_the_log_goes_on_with_mended_ones(
    weigh: Weigh, why: str
) -> None:
    bad = True
    world = play_world(1, lambda *args: weigh(*args) if bad else halves(*args), run=False)
    with pytest.raises(ConfigError) as said:
        world.run(seconds=60.0)
    assert why in said.value.message and "`mine:weights`" in said.value.message
    assert said.value.hint is not None and "--resume" in said.value.hint
    bad = False
    world.start_orchestrator()
    world.run(seconds=5000.0)
    assert world.machine.state.done
    world.ledger.check_end()


def play_world(seed: int, weigh: Weigh, *, run: bool = True, path: Path | None = None) -> World:
    """A run whose roles die, over; its rows are drawn."""
    world = World(
        seed=seed,
        config=curriculum_config(seed),
        workers={"w0": (4, 2), "w1": (3, 0)},
        chances=Chances(
            invalid=0.1, crash=0.03, restart=0.1, trainer_restart=0.05, equal_rewards=0.2
        ),
        samplers=samplers_of(weigh),
        rows=20,
        snapshots=path,
    )
    if run:
        world.run(seconds=60.0)
        world.heal()
        world.run(seconds=5000.0)
        assert world.machine.state.done
    return world


def curriculum_config(seed: int) -> Config:
    """Every second seed has a window alone, the others a sampler, half of them with a window."""
    changes: dict[str, Any] = {"task__sampler": SAMPLER} if seed % 2 else {}
    if seed % 4 != 1:
        changes |= {"task__drop_solved": 0.5}
    return records.make_config(
        run__steps=20,
        groups__per_step=3,
        groups__filter_zero_advantage=True,
        staleness__max_staleness=2,
        groups__attempts_max=5,
        **changes,
    )


@pytest.mark.parametrize("seed", range(4))
def test_every_plan_is_made_again_from_the_log_and_from_a_restored_state(
    seed: int, tmp_path: Path
) -> None:
    world, state, restored = play_world(seed, halves, path=tmp_path), State(), 0
    samplers = samplers_of(halves)
    for at in read_rounds(world.bus, world.topics):
        fold_inputs(state, at.round, [(one.offset, one.value) for one in at.control])
        if at.round.planned and any(isinstance(one, Dispatch) for one in at.round.decisions):
            assert tuple(decide(copy.deepcopy(state), samplers=samplers)) == at.round.decisions
            if restored < 20:
                other = state_of(body_of(state).joined())
                assert other.digest() == state.digest() == digest_of(state)
                assert tuple(decide(other, samplers=samplers)) == at.round.decisions
                restored += 1
        fold_decisions(state, at.round)
        state.chain = at.round.chain
    assert state.digest() == recover(world.bus, world.topics).state.digest()
    assert restored > 3 and len(state.rows) > 5 and bool(world.ledger.skipped) == (not seed % 2)


def test_a_decision_that_skips_other_rows_or_takes_none_of_the_data_is_illegal() -> None:
    stage = stage_of(task__drop_solved=1.0)
    play(stage, even)
    for name in stage.running():
        stage.finish(name)
    state, other = stage.copy(), stage_of(halves).copy()
    spec = train_spec(state, next_training_row(state))
    with pytest.raises(InvariantBroken, match="skips other rows"):
        apply_decision(state, Dispatch(spec=spec, reason="t", skipped=(1,)))
    far = train_spec(other, NextRow(0, ROWS))
    with pytest.raises(InvariantBroken, match="a row that is not there"):
        apply_decision(other, Dispatch(spec=far, reason="t"))


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=30), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_row_under_its_share_and_never_one_of_no_weight(
    weights: list[float], share: float
) -> None:
    if not sum(weights):
        return
    row = Weights(weights).draw(share)
    assert weights[row] > 0
    target = share * sum(weights)
    assert sum(weights[:row]) <= target * (1 + 1e-9)
    assert target <= sum(weights[: row + 1]) * (1 + 1e-9)


def test_recent_rewards_of_a_row_are_bounded() -> None:
    row = UNSEEN
    for number in range(40):
        row = row.and_group(float(number), number)
    assert (row.groups, row.total, row.version) == (40, 780.0, 39)
    assert row.recent == tuple(map(float, range(40 - RECENT_MAX, 40)))


def test_a_hundred_thousand_rows_cost_a_version_a_tenth_of_a_second() -> None:
    rows = 100_000
    stage = stage_of(halves)
    state, task = stage.state, stage.config.task
    tracemalloc.start()
    for index in range(rows):
        row = RowStats(
            groups=9, total=4.0, recent=tuple(one / (16 + index) for one in range(1, 17))
        )
        state.rows[curriculum.row_key("train", index)] = row
    counted, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    state.weights.clear()
    began = time.process_time()
    curriculum.next_row(state, task, rows, samplers=stage.samplers)
    cost_s = time.process_time() - began
    said = f"{1000 * cost_s:.0f} ms for {rows} rows of {counted // rows} bytes"
    assert cost_s < 1.0 and counted < 2000 * rows, said
