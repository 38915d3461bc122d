"""Names of runs, workers and topics.

Names are short ASCII without path characters, because they become topics, keys, headers and files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from dora_pipe.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topics:
    """Topics of one run. Example: ``Topics("demo").control == "demo.control"``."""

    run: str

    def __post_init__(self) -> None:
        check_run_name(self.run)

    @property
    def control(self) -> str:
        """Return the topic of events: joins, logged trajectories, commits, user commands."""
        return f"{self.run}.control"

    @property
    def metrics(self) -> str:
        """Return the topic of periodic statuses; old ones are deleted during a run."""
        return f"{self.run}.metrics"

    @property
    def decisions(self) -> str:
        """Return the topic of the orchestrator's rounds."""
        return f"{self.run}.decisions"

    @property
    def trajectories(self) -> str:
        """Return the topic of trajectories, one per record."""
        return f"{self.run}.trajectories"

    @property
    def progress(self) -> str:
        """Return the topic of long requests' token chunks."""
        return f"{self.run}.progress"

    @property
    def dead_letters(self) -> str:
        """Return the topic of unreadable records with reasons."""
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
"""Reserved names, used by statuses, logs and processes."""

NO_WORKER_NAME: Final = "not a worker's name"
"""Prefix of a fence's reason for an invalid name; such a worker need not join again."""

PATTERN: Final = rf"^[A-Za-z0-9][A-Za-z0-9_-]{{0,{NAME_CHARACTERS_MAX - 1}}}\Z"
"""Pattern of names; `$` would allow a trailing newline."""

_NAME: Final = re.compile(PATTERN)
_QUOTED_CHARACTERS_MAX: Final = 120


def is_name(text: str) -> bool:
    """Return whether a run or worker may have this name."""
    return _NAME.fullmatch(text) is not None


def check_run_name(text: str) -> None:
    """Raises ConfigError for an invalid run name."""
    if not is_name(text):
        raise ConfigError(f"not a run name: {text[:_QUOTED_CHARACTERS_MAX]!r}", hint=RULE)


def worker_name_error(text: str) -> str:
    """Return why a worker's name is invalid, empty if it is valid."""
    if is_name(text) and text not in ROLES:
        return ""
    return f"{NO_WORKER_NAME}: {text[:_QUOTED_CHARACTERS_MAX]!r}"


def check_worker_name(text: str) -> None:
    """Raises ConfigError for an invalid worker name."""
    why = worker_name_error(text)
    if why:
        taken = f"; {', '.join(sorted(ROLES))} are roles" if text in ROLES else ""
        raise ConfigError(why, hint=RULE + taken)
