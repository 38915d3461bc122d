"""The logged keys of a configuration: what may change in a run, as it is in force."""

from __future__ import annotations

from typing import Any

from dora_pipe.config.model import LOGGED, Config


def logged_keys(config: Config) -> dict[str, Any]:
    """The keys that may change in a run, as they are in force."""
    found = {}
    for key in sorted(LOGGED):
        section, _, name = key.partition(".")
        found[key] = getattr(getattr(config, section), name)
    return found


def settings_in_force(config: Config) -> dict[str, float | int | str | bool]:
    """The logged keys that a training step obeys, as `take batch` carries them."""
    return {
        key: value
        for key, value in logged_keys(config).items()
        if key.startswith(("trainer.", "objective.")) and value is not None  # not used by its kind
    }
