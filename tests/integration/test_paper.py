"""`bench paper` prints published and simulated figures side by side."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dora_pipe.bench.commands import app
from dora_pipe.bench.studies.paper.rows import PARTS, Scenario, parted_row, published_rows, simulate
from dora_pipe.bench.studies.paper.scaling_model import FITTED
from dora_pipe.bench.studies.paper.tables import SIZES, limit_min, ratio_rows
from dora_pipe.core.errors import UsageError


def rows(*words: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, ["paper", "--json", *words])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_lengths_stand_beside_what_was_published() -> None:
    actual_rows = rows("--section", "lengths")
    errors = [str(row["error"]) for row in actual_rows if row["error"]]
    assert len(errors) == 7
    assert max(abs(float(error.rstrip("%"))) for error in errors) < 15


def test_an_unknown_section_is_named() -> None:
    result = CliRunner().invoke(app, ["paper", "--section", "moon"])
    assert isinstance(result.exception, UsageError)
    assert "moon" in result.exception.message


def test_ratios_stand_beside_what_was_published() -> None:
    minutes = {("dora", 64): 15.0, ("dora", 128): 10.0}
    for other in ("sync", "one-step"):
        minutes |= {(other, 64): 30.0, (other, 128): 15.0}
    results = {(row["dora against"], row["gpus"]): row for row in ratio_rows(minutes)}
    assert results["one-step", 64]["published"] == pytest.approx(22.94 / 14.67)
    assert results["one-step", 128]["published"] == pytest.approx(14.0 / 10.46)
    assert {row["simulated"] for row in results.values()} == {2.0, 1.5}


def scenario(name: str, gpus: int) -> Scenario:
    return next(row for row in published_rows(gpus) if row.name == name)


def test_a_synchronous_row_at_an_eighth_of_the_size_keeps_its_order() -> None:
    sync = simulate(scenario("sync", 64), seed=1, steps=8, per_step=64)
    dora = simulate(scenario("dora", 64), seed=1, steps=8, per_step=64)
    assert sync.exposed_min > 2 * max(0.1, dora.exposed_min)
    assert sync.staleness == {0: 1.0}


def test_parts_hide_what_a_whole_batch_exposes_and_cost_as_much_training() -> None:
    full, parted = (
        simulate(parted_row(64, parts), seed=1, steps=8, per_step=64) for parts in (1, PARTS)
    )
    assert parted.train_min == pytest.approx(full.train_min, rel=0.05)
    assert parted.exposed_min < 0.7 * full.exposed_min


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize("gpus", SIZES)
def test_with_parts_a_step_is_below_the_published_one_and_near_its_limit(gpus: int) -> None:
    row = parted_row(gpus, PARTS)
    simulation = simulate(row, seed=1)
    assert row.published.step_min is not None
    assert simulation.step_min < row.published.step_min
    assert simulation.step_min < 1.03 * limit_min(row, FITTED)


@pytest.mark.pure
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "within"),
    [("sync", 64, 0.08), ("sync", 128, 0.08), ("one-step", 64, 0.12), ("one-step", 128, 0.18)],
)
def test_fitted_rows_lie_near_what_was_published(name: str, gpus: int, within: float) -> None:
    row = scenario(name, gpus)
    assert row.published.step_min is not None
    simulation = simulate(row, seed=1, steps=10)
    assert simulation.step_min == pytest.approx(row.published.step_min, rel=within)


@pytest.mark.pure
@pytest.mark.slow
def test_no_row_beats_the_limit_of_its_hardware() -> None:
    for row in published_rows(64):
        simulation = simulate(row, seed=2, steps=9)
        tokens = simulation.tokens_s * simulation.step_min * 60
        assert simulation.step_min >= limit_min(row, FITTED, tokens) * 0.97, row.name
