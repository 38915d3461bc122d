"""What runs, workers and topics are called; it decides the one rule for all names.

A name becomes part of topics, keys, headers, files and lines for people, on every log and every
file system: so it is plain ASCII, short, and never a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dora_pipe.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one run. Example: ``Topics("demo").control == "demo.control"``."""

    run: str

    def __post_init__(self) -> None:
        check_run_name(self.run)

    @property
    def control(self) -> str:
        """Facts: who joined, what was logged, what was committed, what a user commands."""
        return f"{self.run}.control"

    @property
    def metrics(self) -> str:
        """Periodic status; lossy: old ones are deleted while a run goes on."""
        return f"{self.run}.metrics"

    @property
    def decisions(self) -> str:
        """The orchestrator's rounds."""
        return f"{self.run}.decisions"

    @property
    def trajectories(self) -> str:
        """One trajectory per record."""
        return f"{self.run}.trajectories"

    @property
    def progress(self) -> str:
        """Token chunks of long requests."""
        return f"{self.run}.progress"

    @property
    def dead_letters(self) -> str:
        """Records that could not be read, as they came, with the reason."""
        return f"{self.run}.dead-letters"

    def all(self) -> tuple[str, ...]:
        return (
            self.control,
            self.metrics,
            self.decisions,
            self.trajectories,
            self.progress,
            self.dead_letters,
        )


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
