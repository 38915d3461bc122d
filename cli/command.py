"""`tell`: what a user asks of a run, as a record in its control topic; the fold decides on it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from dora_pipe.core.errors import UsageError
from dora_pipe.orchestrator.apply_command import ARGS


def parse(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE words as plain values, read as TOML; a bare word is text. Raises UsageError, for a
    verb that there is not too."""
    if verb not in ARGS:
        raise UsageError(f"no verb {verb!r}", hint=f"there are: {', '.join(sorted(ARGS))}")
    allowed = sorted(ARGS[verb])
    args: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in allowed:
            takes = f"it takes: {', '.join(allowed)}" if allowed else "it takes nothing"
            raise UsageError(f"{verb}: cannot use {word!r}", hint=takes)
        args[key] = _value(value)
    return args


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
