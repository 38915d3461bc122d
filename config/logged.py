"""Configurations of a log or a run directory, and the keys that change in a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dora_pipe.config.changes import LOGGED
from dora_pipe.config.model import Config
from dora_pipe.config.training import rate_of


def logged_config(plain: Mapping[str, Any]) -> Config:
    """Return the configuration of `run started`, without checks between sections. Raises
    msgspec.ValidationError. Example: ``logged_config(run_started.config).sampling.temperature``"""
    return msgspec.convert(plain, Config)


MINIBATCHES: Final = "trainer.minibatches"

REFERENCE: Final = "trainer.reference"
"""Setting of a step: the version of a moving reference."""


def logged_keys(config: Config) -> dict[str, Any]:
    """Return the current logged keys."""
    return {key: _value(config, key) for key in sorted(LOGGED)}


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of a step."""
    trainer = config.trainer
    return rate_of(
        step,
        peak=trainer.learning_rate,
        schedule=trainer.schedule,
        warmup=trainer.warmup_steps,
        end=config.run.steps,
        least=trainer.min_lr_ratio,
    )


def settings_in_force(config: Config, step: int) -> dict[str, float | int | str | bool]:
    """Return the settings of a step for `take batch`: logged keys, options, the scheduled
    `trainer.learning_rate`, and the version of a moving reference (`REFERENCE`)."""
    settings = {
        key: value
        for key, value in logged_keys(config).items()
        if key.startswith(("trainer.", "objective.")) and value is not None  # not used by its kind
    }
    settings["trainer.learning_rate"] = learning_rate(config, step)
    if config.objective.reference_every is not None and config.objective.kl_coef:
        settings[REFERENCE] = step - step % config.objective.reference_every
    own = config.objective.options.items()
    return settings | {f"objective.options.{key}": value for key, value in own}
