"""Effective configuration: `run started` plus commands, and its drift from `config.toml`.

The log is authoritative. Free keys and paths may differ between machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.config.changes import with_settings
from dora_pipe.config.load import PATH_KEYS, changed_keys, check_settings, leaves
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.schemas.control import Command, RunStarted, StepCommitted, decode_control
from dora_pipe.schemas.topics import Topics


@dataclass(slots=True)
class EffectiveConfig:
    """Configuration in force; invalid commands change nothing."""

    config: Config
    stop_at: int | None = None
    """Steps of a user's `stop`."""

    @property
    def steps(self) -> int:
        steps = self.config.run.steps
        return steps if self.stop_at is None else min(steps, self.stop_at)

    def command(self, command: Command, *, step: int, waiting: int) -> None:
        """Apply a command, given the next step and the size of U."""
        if command.verb == "set":
            self._set(command.args, step)
        elif command.verb == "stop":
            self._stop(command.args, step, waiting)

    def stop_soon(self, *, step: int, waiting: int) -> None:
        """Apply an early stop, which still trains the groups in flight."""
        self._stop({}, step, waiting)

    def _stop(self, args: dict[str, Any], step: int, waiting: int) -> None:
        now, after = args.get("now", False), args.get("after")
        if not isinstance(now, bool):
            return
        if after is None:
            batches = 0 if now else waiting // self.config.rollout.prompts_per_step
            self.stop_at = min(self.steps, step + batches)
        elif isinstance(after, int) and not isinstance(after, bool) and not now:
            self.stop_at = after + 1 if after + 1 >= step else self.stop_at

    def _set(self, changes: dict[str, Any], step: int) -> None:
        with suppress(ValueError):
            self.config = with_settings(self.config, changes, step=step)


_KINDS: Final = (b'"run-started"', b'"command"', b'"step-committed"')
"""Tags of records that change the configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Differing keys with (log, file) values."""

    frozen: Mapping[str, tuple[Any, Any]]
    logged: Mapping[str, tuple[Any, Any]]

    def __bool__(self) -> bool:
        return bool(self.frozen or self.logged)

    @property
    def line(self) -> str:
        """Format. Example: ``rollout.group_size is 8 in the log and 16 in config.toml``."""
        changed = {**self.frozen, **self.logged}
        differences = [
            f"{key} is {log!r} in the log and {file!r} in config.toml"
            for key, (log, file) in sorted(changed.items())
        ]
        return "; ".join(differences)


def config_drift(bus: Bus, topics: Topics, local: Config) -> Drift:
    """Return the drift of `local`; empty before the start. Raises BusError."""
    configs, _ = _in_force(bus, topics)
    if not configs:
        return Drift(frozen={}, logged={})
    frozen, logged, _ = changed_keys(configs[-1], local)
    before, after = leaves(configs[-1]), leaves(local)
    never = {key for key in logged if all(leaves(config)[key] != after[key] for config in configs)}
    return Drift(
        frozen={key: (before[key], after[key]) for key in frozen.difference(PATH_KEYS)},
        logged={key: (before[key], after[key]) for key in never},
    )


def check_change(bus: Bus, topics: Topics, command: Command) -> None:
    """Raise ConfigError for a `set` that the run would refuse. Raises BusError."""
    configs, step = _in_force(bus, topics)
    if configs and command.verb == "set":
        check_settings(configs[-1], command.args, step=step)


def _in_force(bus: Bus, topics: Topics) -> tuple[list[Config], int]:
    partition = TopicPartition(topics.control, 0)
    effective: EffectiveConfig | None = None
    configs: list[Config] = []
    steps = 0
    with closing(records_of(bus, {partition: bus.end(partition)})) as records:
        for record in records:
            match _decoded(record.value):
                case RunStarted() as started if effective is None:
                    effective = EffectiveConfig(logged_config(started.config))
                    configs.append(effective.config)
                case Command() as command if effective is not None:
                    effective.command(command, step=steps, waiting=0)
                    configs.append(effective.config)
                case StepCommitted() as commit:
                    steps = max(steps, commit.step + 1)
    return configs, steps


def _decoded(value: bytes) -> object:
    if not any(kind in value for kind in _KINDS):
        return None
    try:
        return decode_control(value)
    except SchemaError:
        return None
