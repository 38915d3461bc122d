"""Keys of [objective]: every kind has its own, and says so when it gets another's."""

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from dora_pipe.config.load import dump_toml, from_plain, leaves, load_config
from dora_pipe.config.logged import settings_in_force
from dora_pipe.config.model import FROZEN, LOGGED, Config, Objective
from dora_pipe.config.objectives import CONDITIONAL, KEYS, Kind, settled, uses
from dora_pipe.core.errors import ConfigError
from dora_pipe.orchestrator.apply_command import with_settings

PLAIN: dict[str, Any] = {
    "run": {"name": "r", "steps": 4},
    "model": {"path": "m"},
    "task": {"kind": "arithmetic"},
}


def config(**objective: Any) -> Config:
    return from_plain({**PLAIN, "objective": objective})


def objective_of(made: Config) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(made.objective)
    return {key: value for key, value in plain.items() if value is not None}


def test_every_kind_and_every_key_is_known_on_both_sides() -> None:
    assert set(KEYS) == set(get_args(Kind))
    known = {key for keys in KEYS.values() for key in keys} | set(CONDITIONAL)
    assert known | {"kind"} == set(Objective.__struct_fields__)


@pytest.mark.parametrize("kind", KEYS)
def test_kind_has_a_value_for_every_key_it_uses_and_none_for_others(kind: str) -> None:
    found = objective_of(config(kind=kind))
    assert set(found) == {"kind", *uses({"kind": kind})}
    assert {key: found[key] for key in KEYS[kind]} == dict(KEYS[kind])


def test_configuration_without_an_objective_is_grpo_as_it_was() -> None:
    old = {"clip_low": 0.2, "clip_high": 0.28, "loss": "token-mean", "advantage_std": True}
    found = objective_of(from_plain(PLAIN))
    assert found["kind"] == "grpo"
    assert {key: found[key] for key in (*old, "kl")} == {**old, "kl": 0.0}


@pytest.mark.parametrize(
    ("kind", "key", "value", "hint"),
    [
        ("topr", "clip_low", 0.2, "used by grpo"),
        ("dapo", "kl", 0.1, "used by grpo"),
        ("grpo", "weight_max", 2.0, "used by decoupled-ppo, tis"),
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
                "groups": {"filter_zero_advantage": True},
                "objective": {"advantage": "version-baseline"},
            }
        )


@pytest.mark.parametrize("kind", KEYS)
def test_what_is_shown_is_read_back_the_same(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    shown = config(kind=kind, mask="token")
    file.write_text(dump_toml(shown))
    again = load_config(file, [])
    assert again.objective == shown.objective
    assert from_plain(msgspec.to_builtins(again)) == again


# What a step is told, and what `set` may change.


def test_settings_of_a_step_hold_the_keys_of_the_kind_and_no_empty_ones() -> None:
    found = settings_in_force(config(kind="topr"))
    named = {key for key in found if key.startswith("objective.")}
    assert named == {"objective.kind", *(f"objective.{key}" for key in uses({"kind": "topr"}))}
    assert None not in found.values()


def test_every_key_of_the_objective_may_change_between_steps() -> None:
    named = {key for key in leaves(config()) if key.startswith("objective.")}
    assert named <= LOGGED
    assert not named & FROZEN


def test_another_kind_starts_from_its_own_defaults() -> None:
    before = config(kl=0.1, clip_low=0.3)
    after = with_settings(before, {"objective.kind": "gspo", "objective.clip_high": 0.5})
    found = objective_of(after)
    expected = {**KEYS["gspo"], "clip_high": 0.5}
    assert {key: found[key] for key in expected} == expected


def test_set_keeps_the_other_keys_of_the_same_kind() -> None:
    before = config(kl=0.1, mask="token", mask_high=2.0)
    after = with_settings(before, {"objective.clip_low": 0.3}).objective
    assert (after.kl, after.clip_low, after.mask_high) == (0.1, 0.3, 2.0)
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
