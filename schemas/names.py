"""What runs and workers may be called; it decides the one rule for all names.

A name becomes part of topics, keys, headers, files and lines for people, on every log and every
file system: so it is plain ASCII, short, and never a path.
"""

from __future__ import annotations

import re
from typing import Final

from dora_pipe.core.errors import ConfigError

NAME_CHARACTERS_MAX: Final = 100

RULE: Final = (
    f"letters, digits, '-' and '_', at most {NAME_CHARACTERS_MAX}, starting with a letter or digit"
)

ROLES: Final = frozenset({"orchestrator", "trainer", "traces"})
"""What workers may not be called: statuses, logs and processes go by these names already."""

NO_WORKER_NAME: Final = "not a worker's name"
"""How a fence begins that is for the name; whoever reads it need not join again."""

PATTERN: Final = rf"^[A-Za-z0-9][A-Za-z0-9_-]{{0,{NAME_CHARACTERS_MAX - 1}}}\Z"
"""The rule as an expression; `$` would let a line end pass."""

_NAME: Final = re.compile(PATTERN)
_QUOTED_CHARACTERS_MAX: Final = 120


def is_name(text: str) -> bool:
    """Whether a run or a worker may be called this."""
    return _NAME.fullmatch(text) is not None


def check_run_name(text: str) -> None:
    """Raise ConfigError unless a run may be called this."""
    if not is_name(text):
        raise ConfigError(f"not a run name: {text[:_QUOTED_CHARACTERS_MAX]!r}", hint=RULE)


def worker_name_error(text: str) -> str:
    """Why a worker may not be called this; empty if it may."""
    if is_name(text) and text not in ROLES:
        return ""
    return f"{NO_WORKER_NAME}: {text[:_QUOTED_CHARACTERS_MAX]!r}"


def check_worker_name(text: str) -> None:
    """Raise ConfigError unless a worker may be called this."""
    why = worker_name_error(text)
    if why:
        taken = f"; {', '.join(sorted(ROLES))} are roles" if text in ROLES else ""
        raise ConfigError(why, hint=RULE + taken)
