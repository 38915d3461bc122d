"""Sections that may occur several times, `[[task]]` and `[[evaluation]]`: which of them a key, an
override or a group means, and which processes of a worker serve it. A `Config` holds the first as
`task` and the others as `more_tasks`. Files and overrides only have `[[task]]` and
`task.NAME.key`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora_pipe.config.changes import FROZEN
from dora_pipe.config.model import Config, Evaluation, Task
from dora_pipe.config.section import Section
from dora_pipe.core.errors import ConfigError
from dora_pipe.schemas.identity import source_of

Table = dict[str, Any]

SEVERAL: Final[Mapping[str, tuple[str, type[Section]]]] = {
    "task": ("more_tasks", Task),
    "evaluation": ("more_evaluations", Evaluation),
}
"""Fields of the second and later sections, with their types."""


def take_apart(table: Table) -> None:
    """Split lists of a file into the first and the others. Raises ConfigError."""
    refuse_stored_form(table)
    for section, (more, _) in SEVERAL.items():
        entries = table.get(section)
        if isinstance(entries, list):
            if not entries or not all(isinstance(entry, dict) for entry in entries):
                raise ConfigError(f"{section}: is a section, not a key")
            table[section] = entries[0]
            if entries[1:]:
                table[more] = entries[1:]


def refuse_stored_form(table: Mapping[str, Any]) -> None:
    """Refuse `more_tasks` and `more_evaluations` in files and overrides."""
    for section, (more, _) in SEVERAL.items():
        if more in table:
            raise ConfigError(f"unknown key `{more}`", hint=f"write `[[{section}]]` several times")


def tables_of(table: Mapping[str, Any], section: str) -> list[Table]:
    """Return all tables of a section in plain values."""
    entries = [table.get(section)]
    if section in SEVERAL:
        more = table.get(SEVERAL[section][0])
        entries += more if isinstance(more, list | tuple) else ()
    return [entry for entry in entries if isinstance(entry, dict)]


def addressed(table: Table, override: Table) -> Iterator[tuple[Table, Table]]:
    """Return the table and key of an override; `task.NAME.key` selects by name, and a name takes
    precedence over a key. Raises ConfigError."""
    rest = dict(override)
    for section, (_, kind) in SEVERAL.items():
        there, given = tables_of(table, section), override.get(section)
        if not isinstance(given, dict):
            continue
        by_name = {entry["name"]: entry for entry in there if isinstance(entry.get("name"), str)}
        if len(there) == 1:
            by_name = {name: by_name[name] for name in by_name.keys() - kind.__struct_fields__}
        for name in by_name.keys() & given.keys():
            yield {section: by_name[name]}, {section: given[name]}
        rest[section] = {key: value for key, value in given.items() if key not in by_name}
        if rest[section] and len(there) > 1:
            key = next(iter(rest[section]))
            raise ConfigError(
                f"{section}.{key}: name one of {', '.join(by_name)}:", hint=f"{section}.NAME.{key}"
            )
        if not rest[section]:
            del rest[section]
    yield table, rest


def sections_of(config: Config) -> Iterator[tuple[str, str, Section]]:
    """Yield every top-level section: name in the file, key prefix, section."""
    for field in config.__struct_fields__:
        if field in SEVERAL:
            all_of = config.tasks if field == "task" else config.evaluations
            for section in all_of:
                yield field, f"{field}.{section.name}." if len(all_of) > 1 else f"{field}.", section
        elif isinstance(value := getattr(config, field), Section):
            yield field, f"{field}.", value


LOCAL: Final = tuple(key for key in Task.__struct_fields__ if f"task.{key}" not in FROZEN)
"""Keys of a task that are local to each machine."""


def with_each_task(config: Config, change: Callable[[Task], Task]) -> Config:
    first, *more = map(change, config.tasks)
    return msgspec.structs.replace(config, task=first, more_tasks=tuple(more) or msgspec.UNSET)


def with_tasks_of(config: Config, local: Config) -> Config:
    """Return the configuration with the local task keys of this machine."""
    here = {task.name: task for task in local.tasks}

    def changed(task: Task) -> Task:
        if task.name not in here:
            return task
        own = {key: getattr(here[task.name], key) for key in LOCAL}
        return msgspec.structs.replace(task, **own)

    return with_each_task(config, changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Tasks and data that one pool of task processes serves."""

    task: Task
    sources: tuple[str, ...]
    """Served sources, as in `GroupSpec.source`."""


def pool_specs(config: Config) -> list[PoolSpec]:
    """Return the pools of a worker: one per task, and one per evaluation with its own data."""
    sources = {task.name: [source_of("train", task.name)] for task in config.tasks}
    apart: list[PoolSpec] = []
    for evaluation in config.evaluations:
        task, name = config.task_of(evaluation), source_of("eval", evaluation.name)
        if evaluation.data or evaluation.split:
            own = msgspec.structs.replace(
                task,
                eval_data=evaluation.data or task.eval_data,
                eval_split=evaluation.split,
                eval_share=0.0,
            )
            if task.kind == "dataset":  # What it is trained on is opened elsewhere.
                data = own.eval_data or task.data
                own = msgspec.structs.replace(
                    own, data=data, eval_data=data, split=evaluation.split
                )
            apart.append(PoolSpec(task=own, sources=(name,)))
        else:
            sources[task.name].append(name)
    pools = [PoolSpec(task=task, sources=tuple(sources[task.name])) for task in config.tasks]
    return pools + apart
