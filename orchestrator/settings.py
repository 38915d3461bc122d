"""The logged keys of a configuration: what may change in a run, as it is in force."""

from __future__ import annotations

from typing import Any, Final

from dora_pipe.config.model import LOGGED, Config

LATER: Final = frozenset({"groups.failed_share_max"})
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


def settings_in_force(config: Config) -> dict[str, float | int | str | bool]:
    """The logged keys that a training step obeys, as `take batch` carries them."""
    return {
        key: value
        for key, value in logged_keys(config).items()
        if key.startswith(("trainer.", "objective.")) and value is not None  # not used by its kind
    }
