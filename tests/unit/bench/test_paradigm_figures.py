"""Tests of ratios of paradigms with paired seeds and intervals."""

from __future__ import annotations

import msgspec
import pytest

from dora_pipe.bench.studies.entrants import overrides_of, own_setting, reported
from dora_pipe.bench.studies.paradigms import Cell, ParadigmRun, crossing, isotonic, quickness


def run(entrant: str, seed: int, samples_per_s: float) -> ParadigmRun:
    own = own_setting(entrant, 3e-4)
    return of_cell(msgspec.structs.replace(own, seed=seed), samples_per_s=samples_per_s)


def of_cell(
    cell: Cell, *, samples_per_s: float = 1.0, target_s: float | None = None
) -> ParadigmRun:
    return ParadigmRun(
        setting="s",
        cell=cell,
        steps=48,
        seconds=60.0,
        samples_per_s=samples_per_s,
        target_s=target_s,
        course=(),
        reward=0.9,
        slots_busy=0.5,
        training=0.5,
        staleness=1.0,
    )


def test_an_evaluation_that_is_lucky_is_pooled_with_the_worse_ones_behind_it() -> None:
    course = [(0.0, 0.4), (1.0, 0.9), (2.0, 0.5), (3.0, 0.7), (4.0, 0.8)]
    rewards = [reward for _, reward in isotonic(course)]
    assert rewards == pytest.approx([0.4, 0.7, 0.7, 0.7, 0.8])
    assert crossing(course, 0.75) < 1.0  # type: ignore[operator]
    assert crossing(isotonic(course), 0.75) == pytest.approx(3.5)


def test_cells_are_reported_seed_by_seed_and_set_what_their_paradigm_is() -> None:
    cells = reported([own_setting("dora", 3e-4), own_setting("sync", 3e-4)], 3)
    assert [cell.seed for cell in cells] == [0, 0, 1, 1, 2, 2]
    assert [cell.entrant for cell in cells] == ["dora", "sync", "sync", "dora", "dora", "sync"]
    assert overrides_of(cells[1]) == [
        "staleness.async_batches=1.0",
        "trainer.learning_rate=0.0003",
        "rollout.filter_zero_advantage=true",
        "run.seed=0",
        "staleness.max_staleness=0",
        "staleness.partial_rollout=false",
        "trainer.batch_parts=1",
    ]


def test_a_run_that_never_came_to_the_target_counts_at_its_end() -> None:
    cell = run("dora", 0, 1.0).cell
    assert quickness(of_cell(cell, target_s=20.0)) == 1 / 20
    assert quickness(of_cell(cell, target_s=None)) == 1 / 60
    assert quickness(of_cell(cell, target_s=0.0)) is None
