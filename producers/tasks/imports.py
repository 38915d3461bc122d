"""How `module:attribute` becomes an object, and how a name that is not there is explained."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

from dora_pipe.core.errors import ConfigError, TaskError


def nearest(name: str, known: Iterable[str]) -> str | None:
    """``did you mean `jsonl`?``, or None where nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean `{near[0]}`?" if near else None


def load_attribute(key: str, reference: str) -> Any:
    """The object that `module:attribute` (attribute may have dots) names.

    `key` is the configuration key it stands in, for messages. Raises ConfigError for a reference
    of another form, TaskError where the module cannot be imported or has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"{key}: `{reference}` is not of the form module:attribute",
            hint='for instance "rewards:score" for the function `score` of rewards.py',
        )
    try:
        found: Any = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise TaskError(
            f"{key}: cannot import `{module_name}`: {error}",
            hint="modules are looked for in task.directory first, by default the folder of the"
            " configuration file",
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            public = [name for name in vars(found) if not name.startswith("_")]
            raise TaskError(
                f"{key}: `{module_name}` has no `{attribute}`", hint=nearest(part, public)
            )
        found = getattr(found, part)
    return found
