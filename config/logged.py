"""A configuration as a log or a run's directory has it, and its keys that change in a run.

Keys that may change in a run are in force as its commands left them (`logged_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dora_pipe.config.changes import LOGGED
from dora_pipe.config.model import Config
from dora_pipe.config.schedule import rate_of


def logged_config(plain: Mapping[str, Any]) -> Config:
    """The configuration of `run started`.

    What one section asks of another is not checked. Raises msgspec.ValidationError.

    Example: ``logged_config(run_started.config).sampling.temperature``
    """
    return msgspec.convert(plain, Config)


MINIBATCHES: Final = "trainer.minibatches"

REFERENCE: Final = "trainer.reference"
"""A setting of a step that is no key: the version that its KL is to, where that moves."""


def logged_keys(config: Config) -> dict[str, Any]:
    """The keys that may change in a run, as they are in force."""
    return {key: _value(config, key) for key in sorted(LOGGED)}


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of a step under this configuration."""
    trainer = config.trainer
    return rate_of(
        step,
        peak=trainer.learning_rate,
        schedule=trainer.schedule,
        warmup=trainer.warmup_steps,
        end=config.run.steps,
        least=trainer.learning_rate_min,
    )


def settings_in_force(config: Config, step: int) -> dict[str, float | int | str | bool]:
    """What a training step obeys, as `take batch` carries it: logged keys, own options.

    `trainer.learning_rate` is that of the step: what the schedule makes of the peak. Where the
    reference policy moves, `REFERENCE` is its version.
    """
    found = {
        key: value
        for key, value in logged_keys(config).items()
        if key.startswith(("trainer.", "objective.")) and value is not None  # not used by its kind
    }
    found["trainer.learning_rate"] = learning_rate(config, step)
    if config.objective.reference_every is not None and config.objective.kl:
        found[REFERENCE] = step - step % config.objective.reference_every
    own = config.objective.options.items()
    return found | {f"objective.options.{key}": value for key, value in own}
