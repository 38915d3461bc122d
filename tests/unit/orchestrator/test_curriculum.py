"""Tests of row weights and curricula as functions of the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import ConfigError, InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision, next_training_row, train_spec
from dora_pipe.orchestrator.curriculum import NextRow, Samplers, Weigh
from dora_pipe.orchestrator.rows import UNSEEN, RowStats, Weights
from dora_pipe.schemas.identity import prompt_index
from dora_pipe.schemas.rounds import Dispatch
from tests.support.orchestrator_stage import Stage

ROWS = 10
SAMPLER = "mine:weights"


def halves(rows: Sequence[RowStats], version: int) -> list[float]:
    return [row.mean * (1 - row.mean) + 0.05 if row.groups else 0.25 for row in rows]


def samplers_of(weigh: Weigh) -> Samplers:
    return Samplers(functions={SAMPLER: weigh}, sources={SAMPLER: "sha"})


@pytest.fixture(autouse=True)
def one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("orchestrator.curriculum", "audit.row_ledger"):
        monkeypatch.setattr(f"dora_pipe.{module}.SOLVED_GROUPS", 1)


def stage_of(weigh: Weigh | None = None, **changes: Any) -> Stage:
    if weigh is not None:
        changes["task__sampler"] = SAMPLER
    stage = Stage(**{"run__steps": 30, **changes})
    stage.samplers = weigh and samplers_of(weigh)
    stage.begin(rows=ROWS).worker("w0", slots=8)
    return stage


def play(stage: Stage, reward_of: Callable[[int], float], steps: int = 1) -> list[Dispatch]:
    before, last = len(stage.decided), stage.state.version + steps
    while stage.state.version < last:
        while stage.state.training is None:
            for name in stage.running():
                group = stage.state.groups[stage.state.requests[name].group]
                stage.finish(name, reward=reward_of(group.spec.index))
            stage.settle()
        stage.commit()
        stage.settle()
    return [decision for decision in stage.decided[before:] if isinstance(decision, Dispatch)]


def even(index: int) -> float:
    return float(index % 2 == 0)


def test_solved_rows_are_skipped_in_their_turn_and_named() -> None:
    stage = stage_of(task__max_solve_rate=1.0)
    result = play(stage, even, steps=14)
    late = result[-8:]
    assert all(decision.spec.index % 2 for decision in late) and any(
        decision.skipped for decision in late
    )
    assert all(row % 2 == 0 for entry in result for row in entry.skipped)
    order = [
        row for decision in dispatched(stage) for row in (*decision.skipped, decision.spec.index)
    ]
    assert order == [prompt_index(7, index, ROWS)[1] for index in range(len(order))]
    assert stage.state.curricula["train"].passed == sum(len(entry.skipped) for entry in result)


def dispatched(stage: Stage) -> list[Dispatch]:
    return [decision for decision in stage.decided if isinstance(decision, Dispatch)]


def test_where_every_row_is_solved_the_run_goes_on_with_all_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("orchestrator.curriculum", "audit.row_ledger"):
        monkeypatch.setattr(f"dora_pipe.{module}.SOLVED_GROUPS", 2)
    stage = stage_of(task__max_solve_rate=0.5)
    late = play(stage, lambda index: 1.0, steps=16)[-10:]
    assert all(
        not decision.skipped and decision.reason.endswith("solved, like all others")
        for decision in late
    )
    assert {decision.spec.index for decision in late} == set(range(ROWS))


def test_what_groups_have_come_to_counts_from_the_next_version_on() -> None:
    stage = stage_of(task__max_solve_rate=1.0, rollout__prompts_per_step=1)
    index = stage.state.groups["g0000000000"].spec.index
    stage.finish_group("g0000000000")
    assert [(outcome.index, outcome.reward) for outcome in stage.state.curricula["train"].held] == [
        (index, 1)
    ]
    assert not stage.state.rows
    stage.settle()
    stage.commit()
    assert stage.state.rows[f"train#{index}"] == UNSEEN.and_group(1.0, 0)
    assert not stage.state.curricula["train"].held


def test_rows_are_drawn_by_the_weights_of_a_users_function() -> None:
    stage = stage_of(lambda rows, version: [float(index == version % 3) for index in range(ROWS)])
    results = [*dispatched(stage), *play(stage, even, steps=6)]
    assert {(result.spec.index, result.spec.version % 3) for result in results} == {
        (0, 0),
        (1, 1),
        (2, 2),
    }
    assert [result.spec.data_epoch for result in results] == [
        index // ROWS for index in range(len(results))
    ]


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
def test_weights_that_are_none_are_said_in_one_line_with_a_hint(weigh: Weigh, why: str) -> None:
    stage = Stage(task__sampler=SAMPLER)
    stage.samplers = samplers_of(weigh)
    stage.begin(rows=20).join("w0", slots=8)
    with pytest.raises(ConfigError) as raised:
        stage.settle()
    assert why in raised.value.message and "`mine:weights`" in raised.value.message
    assert raised.value.hint is not None and "--resume" in raised.value.hint


def test_a_decision_that_skips_other_rows_or_takes_none_of_the_data_is_illegal() -> None:
    stage = stage_of(task__max_solve_rate=1.0)
    play(stage, even)
    for name in stage.running():
        stage.finish(name)
    state, other = stage.copy(), stage_of(halves).copy()
    spec = train_spec(state, next_training_row(state))
    with pytest.raises(InvariantBroken, match="skips unexpected rows"):
        apply_decision(state, Dispatch(spec=spec, reason="t", skipped=(1,)))
    far = train_spec(other, NextRow(0, ROWS))
    with pytest.raises(InvariantBroken, match="an unknown row"):
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
