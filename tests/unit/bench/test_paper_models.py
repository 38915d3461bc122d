"""Tests of published models: response lengths and GPU scaling."""

from __future__ import annotations

import pytest

from dora_pipe.bench.studies.paper.lengths import EFFICIENCY, STEP_100, bubble, figures_of
from dora_pipe.bench.studies.paper.scaling_model import FITTED, step_tokens


def test_a_length_is_a_function_of_seed_ordinal_and_sample() -> None:
    forwards = [EFFICIENCY.draw(seed=3, ordinal=index, size=16) for index in range(20)]
    backwards = [EFFICIENCY.draw(seed=3, ordinal=index, size=16) for index in reversed(range(20))]
    assert forwards == backwards[::-1]
    assert EFFICIENCY.draw(seed=4, ordinal=0, size=16) != forwards[0]


def test_step_100_has_the_published_mean_and_bubble() -> None:
    figures = figures_of(STEP_100, size=16)
    assert figures.mean == pytest.approx(3536, rel=0.03)
    assert bubble(figures, longest=STEP_100.cap) == pytest.approx(0.885, abs=0.01)
    assert STEP_100.cap / figures.p50 == pytest.approx(28, rel=0.05)


@pytest.mark.parametrize("gpus", [16, 32, 64])
def test_a_step_costs_the_trainer_what_the_law_says(gpus: int) -> None:
    rates = FITTED.trainer(gpus)
    assert rates.step_s(tokens=round(step_tokens())) == pytest.approx(
        FITTED.train_fixed_s + FITTED.train_gpu_s / gpus
    )
    assert rates.fixed_s == FITTED.train_fixed_s
