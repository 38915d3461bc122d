"""Tests of learning rate schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config.changes import with_settings
from dora_pipe.config.load import ELSEWHERE, leaves
from dora_pipe.config.logged import settings_in_force
from dora_pipe.config.training import rate_of
from dora_pipe.core.errors import ConfigError
from tests.support.configs import small_config

FALLING = st.sampled_from(["linear", "cosine"])
SHAPES = st.tuples(st.integers(0, 50), st.integers(1, 400)).map(
    lambda pair: {"warmup": pair[0], "end": pair[0] + pair[1]}
)
LEAST = st.floats(0, 1)


def config(objective: Any = None, **trainer: Any) -> Any:
    run = {"name": "r", "steps": 40}
    return small_config(run=run, objective=objective or {}, trainer=trainer)


@given(FALLING, SHAPES, LEAST)
def test_rate_grows_in_equal_parts_to_its_peak_then_falls_to_the_least_and_stays(
    schedule: Any, shape: dict[str, int], least: float
) -> None:
    warmup, end = shape["warmup"], shape["end"]
    rates = [
        rate_of(step, peak=2.0, schedule=schedule, least=least, **shape) for step in range(end + 3)
    ]
    assert rates[:warmup] == [2.0 * ((step + 1) / warmup) for step in range(warmup)]
    assert rates[warmup] == pytest.approx(2.0, rel=1e-15)
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[end:] == [2.0 * least] * 3
    assert all(0 <= rate <= 2.0 for rate in rates)


@given(FALLING, SHAPES, LEAST)
def test_no_step_falls_by_more_than_its_share_of_the_curve(
    schedule: Any, shape: dict[str, int], least: float
) -> None:
    steepest = 1.0 if schedule == "linear" else math.pi / 2
    length = shape["end"] - shape["warmup"]
    for step in range(shape["warmup"], shape["end"]):
        now, after = (
            rate_of(position, peak=1.0, schedule=schedule, least=least, **shape)
            for position in (step, step + 1)
        )
        assert now - after <= (1 - least) * steepest / length + 1e-12


@given(st.integers(0, 400), SHAPES)
def test_cosine_is_that_of_the_library_to_its_last_digits(step: int, shape: dict[str, int]) -> None:
    ours = rate_of(step, peak=1.0, schedule="cosine", least=0.0, **shape)
    if shape["warmup"] <= step <= shape["end"]:
        removed = (step - shape["warmup"]) / (shape["end"] - shape["warmup"])
        assert ours == pytest.approx((1 + math.cos(math.pi * removed)) / 2, abs=4e-16)


@given(st.integers(0, 1000), st.floats(1e-9, 10))
def test_constant_rate_without_warm_up_is_the_configured_one_to_its_bits(
    step: int, peak: float
) -> None:
    assert rate_of(step, peak=peak, schedule="constant", warmup=0, end=4, least=0.0) == peak


def test_settings_of_a_step_have_its_rate_and_no_other_key_of_the_schedule() -> None:
    plain = config(learning_rate=0.5)
    falling = config(learning_rate=0.5, schedule="linear", warmup_steps=10)
    assert settings_in_force(falling, 4)["trainer.learning_rate"] == 0.25
    assert settings_in_force(falling, 25)["trainer.learning_rate"] == 0.25
    assert settings_in_force(falling, 9) == settings_in_force(plain, 9)


def test_settings_of_a_step_name_the_reference_where_it_moves() -> None:
    def settings(step: int, **objective: Any) -> dict[str, Any]:
        return settings_in_force(config(objective=objective), step)

    assert "trainer.reference" not in settings(9, kl_coef=0.1)
    named = [
        settings(step, kl_coef=0.1, reference_every=4)["trainer.reference"] for step in range(9)
    ]
    assert named == [0, 0, 0, 0, 4, 4, 4, 4, 8]
    with pytest.raises(ConfigError, match="no KL to a reference"):
        config(objective={"reference_every": 4})


def test_reference_moves_on_when_the_kind_of_objective_changes() -> None:
    before = config(objective={"kl_coef": 0.1, "reference_every": 4})
    other = with_settings(before, {"objective.kind": "dapo"})
    assert "trainer.reference" not in settings_in_force(other, 8)
    again = with_settings(other, {"objective.kind": "gspo", "objective.kl_coef": 0.2})
    assert settings_in_force(again, 9)["trainer.reference"] == 8
    with pytest.raises(ValueError, match="cannot change in a run"):
        with_settings(before, {"objective.reference_every": 2})


@pytest.mark.parametrize(
    ("trainer", "key"),
    [
        ({"warmup_steps": 41}, "trainer.warmup_steps"),
        ({"min_lr_ratio": 0.1}, "trainer.min_lr_ratio"),
    ],
)
def test_schedule_that_cannot_be_meant_is_refused(trainer: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: ") as raised:
        config(**trainer)
    assert raised.value.hint


def test_names_of_other_systems_are_answered_with_ours() -> None:
    assert set(ELSEWHERE.values()) <= set(leaves(config()))
    for name, ours in ELSEWHERE.items():
        with pytest.raises(ConfigError, match=f"unknown key `trainer.{name}`") as raised:
            config(**{name: 1})
        assert f"`{ours}`" in (raised.value.hint or "")
