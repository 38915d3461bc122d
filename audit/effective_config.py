"""Which configuration was in force: `run started`, then what users' commands changed of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from dora_pipe.config.model import LOGGED, Config, in_flight_batches
from dora_pipe.config.objectives import refused_kind
from dora_pipe.schemas.control import Command


@dataclass(slots=True)
class EffectiveConfig:
    """Follows the commands of a run; a command that cannot be obeyed changes nothing."""

    config: Config
    stop_at: int | None = None
    """Steps after which a user's `stop` ends the run."""

    @property
    def steps(self) -> int:
        """The run ends when so many steps are committed."""
        steps = self.config.run.steps
        return steps if self.stop_at is None else min(steps, self.stop_at)

    def command(self, command: Command, *, step: int, waiting: int) -> None:
        """A user's command, given the next step s and the size of U."""
        if command.verb == "set":
            self._set(command.args, step)
        elif command.verb == "stop":
            self._stop(command.args, step, waiting)

    def _stop(self, args: dict[str, Any], step: int, waiting: int) -> None:
        now, after = args.get("now", False), args.get("after")
        if not isinstance(now, bool):
            return
        if after is None:
            batches = 0 if now else waiting // self.config.groups.per_step
            self.stop_at = min(self.steps, step + batches)
        elif isinstance(after, int) and not isinstance(after, bool) and not now:
            self.stop_at = after + 1 if after + 1 >= step else self.stop_at

    def _set(self, changes: dict[str, Any], step: int) -> None:
        plain = msgspec.to_builtins(self.config)
        before = self.config.objective.kind
        if not changes.keys() <= LOGGED or refused_kind(
            before, changes.get("objective.kind", before)
        ):
            return
        for key, value in changes.items():
            section, _, name = key.partition(".")
            plain[section][name] = value
        try:
            changed = msgspec.convert(plain, Config)
        except msgspec.ValidationError:
            return
        if in_flight_batches(changed.staleness) >= 1 and changed.run.steps >= step:
            self.config = changed
