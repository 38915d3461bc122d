"""Tests of the off-policy study: exact staleness, paired seeds, resumption."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.studies.cells import CellFile, setting_digest
from dora_pipe.bench.studies.offpolicy import (
    BASE,
    Cell,
    Measured,
    StaleQueue,
    sampled_by,
    steps_of,
    summarise,
)
from dora_pipe.core.errors import UsageError
from tests.support.offpolicy import measured

etas = st.integers(0, 12)
lengths = st.integers(1, 40)


@given(eta=etas, steps=lengths)
def test_every_step_is_sampled_once_by_the_version_that_is_eta_behind(eta: int, steps: int) -> None:
    created = [
        (step, version)
        for version in range(steps)
        for step in steps_of(version, eta=eta, steps=steps)
    ]
    assert sorted(created) == [(step, max(0, step - eta)) for step in range(steps)]


@given(eta=etas, steps=lengths)
def test_the_queue_hands_every_step_what_the_right_version_sampled(eta: int, steps: int) -> None:
    queue: StaleQueue[tuple[int, int]] = StaleQueue(eta=eta, steps=steps)
    for version in range(steps):
        queue.fill(version, lambda step: (step, version))  # noqa: B023
        assert queue.take(version) == (version, sampled_by(version, eta))


def test_a_cell_is_compared_with_the_base_of_its_own_seed() -> None:
    summary = summarise(
        [
            measured(BASE, 0, 0, 0.9),
            measured(BASE, 0, 1, 0.7),
            measured("tis", 8, 0, 0.8, clipped=0.1, masked=0.2),
            measured("tis", 8, 1, 0.75, clipped=0.3, masked=0.4),
        ]
    )
    base, tis = summary
    assert (base.objective, base.eta, tis.objective, tis.eta) == (BASE, 0, "tis", 8)
    assert tis.to_base is not None
    assert tis.to_base.low == pytest.approx(-0.1) and tis.to_base.high == pytest.approx(0.05)
    assert (tis.last.low, tis.last.high) == (0.75, 0.8)
    assert tis.last.mean == pytest.approx(0.775)
    assert tis.clipped == pytest.approx(0.2) and tis.masked == pytest.approx(0.3)
    assert base.masked is None


# The file of results

STUDIED = {"trainer.learning_rate": 1e-3, "task.options": {"mu": 1.0}}
S = setting_digest(STUDIED)
FIRST = measured("grpo", 0, 0, 0.8, setting=S)


def opened(folder: Path, setting: Mapping[str, Any] | None = None) -> CellFile[Cell, Measured]:
    return CellFile(folder, STUDIED if setting is None else setting, kind=Measured)


def test_cells_of_another_setting_are_refused(tmp_path: Path) -> None:
    opened(tmp_path).add(FIRST)
    with pytest.raises(UsageError, match="study with other settings"):
        opened(tmp_path, {**STUDIED, "trainer.learning_rate": 2e-3})
