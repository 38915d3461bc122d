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
from dora_pipe.config.several import tables_of

FILLED_IN: Final = ("trainer.parts", "evaluation.sampling")
"""Frozen keys, or sections of them, that a file which says nothing of them gets by more than a
default: from other keys, or by what was best when the package was made. A run that goes on has them
as it began, whatever would be filled in now; a test finds those that are missing here."""


def logged_config(plain: Mapping[str, Any]) -> Config:
    """The configuration of `run started`.

    What one section asks of another is not checked. Raises msgspec.ValidationError.

    Example: ``logged_config(run_started.config).sampling.temperature``
    """
    return msgspec.convert(plain, Config)


def as_begun(table: dict[str, Any], begun: Mapping[str, Any]) -> None:
    """Lay under a file's table what its run began with, of the keys of `FILLED_IN`. What the file
    says stays.

    Both tables have their lists taken apart (`several.take_apart`).
    """
    names: dict[str, set[str]] = {}
    for dotted in FILLED_IN:
        section, _, name = dotted.partition(".")
        names.setdefault(section, set()).add(name)
    for section, kept in names.items():
        table.setdefault(section, {})
        values = {str(one.get("name", "")): one for one in tables_of(begun, section)}
        for own in tables_of(table, section):
            for name in kept & values.get(str(own.get("name", "")), {}).keys():
                own[name] = _under(values[str(own.get("name", ""))][name], own.get(name))


def _under(begun: Any, own: Any) -> Any:
    """A key's value, or the keys of its section."""
    if isinstance(begun, Mapping) and isinstance(own, Mapping | None):
        return {**begun, **(own or {})}
    return begun if own is None else own


MINIBATCHES: Final = "trainer.minibatches"

REFERENCE: Final = "trainer.reference"
"""A setting of a step that is no key: the version that its KL is to, where that moves."""

LATER: Final = frozenset({"groups.failed_share_max", "objective.teacher_weight"})
"""Keys that older runs do not have: None, and not among their logged keys."""


def logged_keys(config: Config) -> dict[str, Any]:
    """The keys that may change in a run, as they are in force."""
    found = {}
    for key in sorted(LOGGED):
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if value is not None or key not in LATER:
            found[key] = value
    return found


def learning_rate(config: Config, step: int) -> float:
    """The learning rate of a step under this configuration."""
    trainer = config.trainer
    return rate_of(
        step,
        peak=trainer.learning_rate,
        schedule=trainer.schedule,
        warmup=trainer.warmup_steps,
        end=trainer.schedule_steps or config.run.steps,
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
