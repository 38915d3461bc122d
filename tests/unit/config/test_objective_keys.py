"""Tests of keys of [objective] by kind."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config.changes import FROZEN, LOGGED, with_settings
from dora_pipe.config.load import changed_keys, dump_toml, from_plain, leaves, load_config
from dora_pipe.config.logged import settings_in_force
from dora_pipe.config.model import Config, Objective
from dora_pipe.config.objectives import BUILT_IN, CONDITIONAL, FOR_GOOD, settled, uses
from dora_pipe.consumers.learners.settings import step_settings
from dora_pipe.core.errors import ConfigError
from tests.support.configs import plain_config
from tests.support.objectives import OF_TRAINER

PLAIN = plain_config()


def config(**objective: Any) -> Config:
    teacher = {"teacher": {"path": "t"}} if objective.get("kind") == "distill" else {}
    return from_plain({**PLAIN, **teacher, "objective": objective})


def objective_of(config: Config) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(config.objective)
    assert plain.pop("options") == {}
    return {key: value for key, value in plain.items() if value is not None}


def test_every_kind_and_every_key_is_known_on_both_sides() -> None:
    keys = {key for row in BUILT_IN.values() for key in row.keys} | set(CONDITIONAL)
    assert keys | {"kind", *FOR_GOOD} == set(Objective.__struct_fields__)


@pytest.mark.parametrize("kind", BUILT_IN)
def test_kind_has_a_value_for_every_key_it_uses_and_none_for_others(kind: str) -> None:
    objective = objective_of(config(kind=kind))
    assert set(objective) == {"kind", *uses({"kind": kind})}
    assert {key: objective[key] for key in BUILT_IN[kind].keys} == dict(BUILT_IN[kind].keys)


@pytest.mark.parametrize(
    ("kind", "key", "value", "hint"),
    [
        ("topr", "clip_low", 0.2, "used by grpo"),
        ("dapo", "kl_coef", 0.1, "used by grpo"),
        ("grpo", "max_weight", 2.0, "used by decoupled-ppo, tis"),
        ("topr", "positive_weight", 2.0, "used by weighted-topr"),
        ("gspo", "level", "token", "used by decoupled-ppo"),
        ("grpo", "mask_low", 0.5, "set objective.mask"),
        ("grpo", "loss_tokens", 100, "set objective.loss"),
    ],
)
def test_key_that_the_kind_does_not_use_is_an_error_with_a_hint(
    kind: str, key: str, value: Any, hint: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^objective\.{key}: ") as caught:
        config(kind=kind, **{key: value})
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"kind": "ppo"}, "objective.kind"),
        ({"mask": "token", "mask_low": 3.0, "mask_high": 2.0}, "mask_low: 3 is not below"),
        ({"mask": "token", "mask_low": 6.0}, "mask_low: 6 is not below mask_high, 5"),
        ({"clip_low": 0.0}, "objective.clip_low"),
        ({"kl_estimate": "k4"}, "objective.kl_estimate"),
        ({"loss": "constant", "loss_tokens": 0}, "objective.loss_tokens"),
        ({"clip_hgih": 1.0}, "unknown key `objective.clip_hgih`"),
    ],
)
def test_wrong_value_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**keys)
    assert message in str(caught.value)


def test_loss_tokens_are_the_most_that_a_trajectory_may_sample() -> None:
    plain = {**PLAIN, "sampling": {"max_tokens": 100}, "objective": {"kind": "dr-grpo"}}
    assert from_plain(plain).objective.loss_tokens == 100
    given = {"kind": "dr-grpo", "loss_tokens": 7}
    assert from_plain({**plain, "objective": given}).objective.loss_tokens == 7


def test_filter_of_equal_rewards_does_not_go_with_a_baseline_that_gives_them_an_advantage() -> None:
    with pytest.raises(ConfigError, match="filter_zero_advantage"):
        from_plain(
            {
                **PLAIN,
                "rollout": {"filter_zero_advantage": True},
                "objective": {"advantage": "version-baseline"},
            }
        )


@pytest.mark.parametrize("kind", BUILT_IN)
def test_what_is_shown_is_read_back_the_same(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    shown = config(kind=kind, mask="token")
    file.write_text(dump_toml(shown))
    again = load_config(file, [])
    assert again.objective == shown.objective
    assert from_plain(msgspec.to_builtins(again)) == again


# Step settings, and changes by `set`.


def test_settings_of_a_step_hold_the_keys_of_the_kind_and_no_empty_ones() -> None:
    settings = settings_in_force(config(kind="topr"), 0)
    named = {key for key in settings if key.startswith("objective.")}
    assert named == {"objective.kind", *(f"objective.{key}" for key in uses({"kind": "topr"}))}
    assert None not in settings.values()


def test_every_key_of_the_objective_but_two_may_change_between_steps() -> None:
    named = {key for key in leaves(config()) if key.startswith("objective.")}
    for_good = {f"objective.{name}" for name in FOR_GOOD}
    assert named - LOGGED == for_good == named & FROZEN


def test_another_kind_starts_from_its_own_defaults() -> None:
    before = config(kl_coef=0.1, clip_low=0.3)
    after = with_settings(before, {"objective.kind": "gspo", "objective.clip_high": 0.5})
    objective = objective_of(after)
    expected = {**BUILT_IN["gspo"].keys, "clip_high": 0.5}
    assert {key: objective[key] for key in expected} == expected


def test_set_keeps_the_other_keys_of_the_same_kind() -> None:
    before = config(kl_coef=0.1, mask="token", mask_high=2.0)
    after = with_settings(before, {"objective.clip_low": 0.3}).objective
    assert (after.kl_coef, after.clip_low, after.mask_high) == (0.1, 0.3, 2.0)
    off = with_settings(before, {"objective.mask": "none"}).objective
    assert off.mask_high is None


def test_set_refuses_a_key_that_the_kind_does_not_use() -> None:
    with pytest.raises(ValueError, match="does not use it"):
        with_settings(config(kind="topr"), {"objective.clip_low": 0.1})


def test_key_that_was_changed_is_not_forgotten() -> None:
    assert settled({"kind": "grpo", "mask": "none"}, {"mask_low": 0.1}) == {
        "kind": "grpo",
        "mask": "none",
        "mask_low": 0.1,
    }


# A user's objective: not imported here.


def test_own_kind_has_the_keys_of_all_and_its_options_reach_the_step(tmp_path: Path) -> None:
    own = config(kind="mine:MINE", mask="token", options={"beta": 2.0, "how": "soft"})
    assert own.objective.proximal == "behaviour" and own.objective.clip_low is None
    settings = settings_in_force(own, 0)
    assert settings["objective.options.beta"] == 2.0 and settings["objective.options.how"] == "soft"
    assert step_settings({**OF_TRAINER, **settings}).objective == own.objective
    file = tmp_path / "run.toml"
    file.write_text(dump_toml(own))
    assert load_config(file, []).objective == own.objective
    with pytest.raises(ConfigError, match="does not use it"):
        config(kind="mine:MINE", clip_low=0.1)


@pytest.mark.parametrize(
    ("before", "after"),
    [("grpo", "ppo"), ("grpo", "mine:MINE"), ("mine:MINE", "grpo"), ("mine:MINE", "mine:OTHER")],
)
def test_own_kind_neither_comes_nor_goes_while_a_run_lasts(before: str, after: str) -> None:
    old, words = config(kind=before), f"Invalid enum value '{after}' - at `$.objective.kind`"
    with pytest.raises(ValueError) as caught:
        with_settings(old, {"objective.kind": after})
    assert str(caught.value) == words
    if ":" in before + after:
        assert changed_keys(old, config(kind=after))[0] == {"objective.kind"}
    assert with_settings(old, {"objective.kl_coef": 0.5}).objective.kl_coef == 0.5
    with pytest.raises(ValueError, match="cannot change in a run"):
        with_settings(old, {"objective.options": {}})


# A teacher.

THERE = {"path": "t"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"teacher": THERE}, "teacher: the objective does not use the teacher"),
        (
            {"objective": {"teacher_weight": 0.5}},
            r"objective.teacher_weight: requires teacher.path",
        ),
        ({"objective": {"kind": "distill"}}, r"objective.teacher_weight: requires teacher.path"),
        (
            {"teacher": {**THERE, "url": "http://h", "model": "m"}},
            r"teacher.url: excludes teacher.path",
        ),
        ({"teacher": {"url": "http://h"}}, r"teacher.model: is required with teacher.url"),
        ({"teacher": {**THERE, "model": "m"}}, r"teacher.model: is required with teacher.url"),
        ({"teacher": {"url": "http://me:pw@h", "model": "m"}}, "no credentials"),
        (
            {"teacher": {"url": "http://h", "model": "m"}, "sampling": {"temperature": 0.7}},
            "of temperature 1, the policy's 0.7",
        ),
        (
            {
                "teacher": THERE,
                "objective": {"kind": "distill"},
                "rollout": {"filter_zero_advantage": True},
            },
            "rewards are unused",
        ),
    ],
)
def test_teacher_that_does_not_fit_is_refused(changed: dict[str, Any], words: str) -> None:
    objective = {} if "teacher: the objective" in words else {"objective": {"kind": "distill"}}
    with pytest.raises(ConfigError, match=words) as refused:
        from_plain({**PLAIN, **objective, **changed})
    assert "pw" not in refused.value.message


def test_teacher_goes_with_any_kind_and_any_temperature_of_a_directory() -> None:
    for kind in BUILT_IN:
        weight = {} if kind == "distill" else {"teacher_weight": 0.1}
        plain = {**PLAIN, "teacher": THERE, "sampling": {"temperature": 0.7}}
        result = from_plain({**plain, "objective": {"kind": kind, **weight}})
        assert result.objective.teacher_weight == weight.get("teacher_weight", 1.0)
