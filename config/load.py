"""Read a TOML file and overrides as a checked `Config` with resolved paths. Each ConfigError is one
line that names the key."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.config import objectives
from dora_pipe.config.batches import with_parts
from dora_pipe.config.changes import FROZEN, LOGGED, with_settings
from dora_pipe.config.checks import problems_of
from dora_pipe.config.describe import dump_toml
from dora_pipe.config.model import Config, EvaluationSampling
from dora_pipe.config.section import Section
from dora_pipe.config.several import (
    SEVERAL,
    addressed,
    refuse_stored_form,
    sections_of,
    tables_of,
    take_apart,
)
from dora_pipe.core.errors import ConfigError
from dora_pipe.schemas.topics import PATTERN, RULE

__all__ = ["changed_keys", "dump_toml", "from_plain", "leaves", "load_config", "read_table"]

PATH_KEYS: Final = (
    "model.path",
    "model.chat_template",
    "teacher.path",
    "task.data",
    "task.eval_data",
    "task.directory",
    "task.python",
    "evaluation.data",
    "store.path",
    "bus.password_file",
    "bus.ca_file",
    "bus.cert_file",
    "bus.key_file",
    "transfers.ca_file",
    "transfers.cert_file",
)
"""Relative to the configuration file; in an override, to the current directory."""

LINK_KEYS: Final = ("task.python",)
"""Paths whose symbolic links are kept: an environment's interpreter is a link."""

INTEGER_MAX: Final = 2**63 - 1
"""Larger integers become floats in records."""

_SQLITE = "sqlite:"
_HUB = "hf:"
_MORE: Final = frozenset(more for more, _ in SEVERAL.values())
_NOT_TOML: Final = (ValueError, RecursionError)
"""Errors of tomllib: its own, UTF-8, a number of 5000 digits, 400 brackets."""

_AT = re.compile(r"^(?P<what>.*?) - at `\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_NO_CHOICE = re.compile(r"^Invalid enum value '(?P<value>.*)'$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<key>[^`]*)`$")

Table = dict[str, Any]

ELSEWHERE: Final[Mapping[str, str]] = {
    "adam_beta1": "trainer.betas",
    "beta": "objective.kl_coef",
    "clip_ratio_high": "objective.clip_high",
    "clip_ratio_low": "objective.clip_low",
    "early_stopping_patience": "evaluation.patience",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "kl_loss_coef": "objective.kl_coef",
    "load_best_model_at_end": "evaluation.best",
    "lr": "trainer.learning_rate",
    "lr_scheduler": "trainer.schedule",
    "lr_scheduler_type": "trainer.schedule",
    "lr_warmup_steps": "trainer.warmup_steps",
    "max_completion_length": "sampling.max_tokens",
    "grad_clip": "trainer.max_grad_norm",
    "max_steps": "run.steps",
    "num_generations": "rollout.group_size",
    "num_iterations": "trainer.minibatches",
    "per_device_train_batch_size": "trainer.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "trainer.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "trainer.micro_batch_tokens",
    "ref_model_sync_steps": "objective.reference_every",
    "warmup_ratio": "trainer.warmup_steps",
}
"""Keys of trl and verl with ours. `per_device_train_batch_size` counts rows, ours tokens. verl's
`ppo_mini_batch_size` is a size, `trainer.minibatches` a count, so no hint names it."""


def load_config(path: Path, overrides: Sequence[str], *, another: bool = False) -> Config:
    """Read a TOML file, or that of a run's directory, with `key=value` overrides.

    Values are TOML; a bare word is a string (``-o trainer.kind=torch``), and so is any value of a
    text key (``-o run.name=1``). With `another`, a different kind of objective starts from its own
    defaults. Raises ConfigError.
    """
    path = config_file_in(path)
    table = read_table(path)
    take_apart(table)
    if another:
        _settle_objective(table, overrides)
    folder = path.resolve().parent
    _resolve_paths(table, folder)
    return laid_over(table, overrides, folder)


def config_file_in(path: Path) -> Path:
    """Return the configuration file of a run's directory, or the path itself."""
    inside = path / "config.toml"
    return inside if inside.is_file() else path


def laid_over(table: Table, overrides: Sequence[str], folder: Path) -> Config:
    """Return the Config of a table with `key=value` overrides; `folder` contains modules of users.
    Raises ConfigError."""
    for text in overrides:
        override = _parse_override(text)
        refuse_stored_form(override)
        for target, part in addressed(table, override):
            _resolve_paths(part, Path.cwd())
            _merge(target, part, "")
    _fill_in(table, folder)
    config = from_plain(table)
    return config if "batch_parts" in table.get("trainer", {}) else with_parts(config)


def read_table(path: Path) -> Table:
    """Read a TOML file without checks. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except _NOT_TOML as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error


def check_settings(config: Config, changes: Mapping[str, Any], *, step: int) -> None:
    """Raise ConfigError for changes that a run would refuse before `step`."""
    try:
        with_settings(config, changes, step=step)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for key, value in changes.items():
        if not _is_plain(value):
            raise ConfigError(f"{key}: a number is not finite or too large")


def from_plain(table: Mapping[str, Any]) -> Config:
    """Return a checked Config from plain values of TOML or `run started`. Raises ConfigError."""
    _check_keys(table, Config, "")
    _check_objective(table.get("objective"))
    try:
        config = msgspec.convert(table, Config)
        plain = {key: _is_plain(value) for key, value in leaves(config).items()}
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except RecursionError:
        raise ConfigError("a value is nested too deeply") from None
    for key, is_plain in plain.items():
        if not is_plain:
            raise ConfigError(f"{key}: a value is not finite, too large, not UTF-8 or not plain")
    for problem in problems_of(config):
        raise ConfigError(problem.text, hint=problem.hint)
    return config


def leaves(config: Config) -> dict[str, Any]:
    """Return every key by its dotted name, in file order; `task.options` is one key. Keys of
    several tasks or evaluations are `task.NAME.key`."""
    values: dict[str, Any] = {}
    for _, prefix, section in sections_of(config):
        values |= _leaves(section, prefix)
    return values


def changed_keys(old: Config, new: Config) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return the keys that differ: (frozen, logged, free). A user's objective is frozen."""
    before, after = leaves(old), leaves(new)
    of_any = _keys_of_any(old) | _keys_of_any(new)
    one_sided = before.keys() ^ after.keys()
    both = before.keys() & after.keys()
    changed = one_sided | {key for key in both if before[key] != after[key]}
    frozen = frozenset(
        key for key in changed if of_any[key] in FROZEN or key.split(".")[0] in FROZEN
    )
    if objectives.refused_kind(old.objective.kind, new.objective.kind):
        frozen |= {"objective.kind"}
    logged = frozenset(changed & LOGGED) - frozen
    return frozen, logged, frozenset(changed - frozen - logged)


def _keys_of_any(config: Config) -> dict[str, str]:
    return {
        key: f"{name}.{key.removeprefix(prefix)}"
        for name, prefix, section in sections_of(config)
        for key, _ in _leaves(section, prefix)
    }


def _leaves(section: Section, prefix: str) -> Iterator[tuple[str, Any]]:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _settle_objective(table: Table, overrides: Sequence[str]) -> None:
    given = plain_overrides(overrides).items()
    changes = {key.removeprefix("objective."): value for key, value in given if "objective." in key}
    if changes:
        table["objective"] = objectives.settled(table.get("objective", {}), changes)


def plain_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return overrides by dotted key. Raises ConfigError. Example:
    ``plain_overrides(["objective.kl_coef=0.1"]) == {"objective.kl_coef": 0.1}``"""
    values: dict[str, Any] = {}
    for text in overrides:
        _flatten(_parse_override(text), "", values)
    return values


def _flatten(table: Table, prefix: str, into: dict[str, Any]) -> None:
    for key, value in table.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{key}.", into)
        else:
            into[f"{prefix}{key}"] = value


def _parse_override(text: str) -> Table:
    key, sign, value = text.partition("=")
    if not sign or "\n" in text:
        raise ConfigError(f"-o {text!r}: not of the form key=value")
    bare = value.strip()
    quoted = bare[:1] in ("'", '"', "[", "{")
    if quoted or not _takes_text(key):
        try:
            return tomllib.loads(f"{key} = {value}")
        except _NOT_TOML as error:
            if quoted:
                raise ConfigError(f"-o {text}: {error}") from error
    try:
        return tomllib.loads(f"{key} = {json.dumps(bare)}")
    except _NOT_TOML as error:
        raise ConfigError(f"-o {text}: {error}") from error


def _takes_text(key: str) -> bool:
    """Return whether a key is a text, for which `1`, `true` and `nan` are texts, too."""
    kind: Any = Config
    for index, name in enumerate(key.strip().split(".")):
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            return False
        if name in _fields(kind):
            kind = _fields(kind)[name]
        elif index != 1:  # There stands the name of a task or evaluation, where there are several.
            return False
    annotated = typing.get_origin(kind) is typing.Annotated
    return (typing.get_args(kind)[0] if annotated else kind) is str


def _merge(table: Table, override: Table, prefix: str) -> None:
    for key, value in override.items():
        there = table.get(key)
        if isinstance(value, dict) and isinstance(there, dict):
            _merge(there, value, f"{prefix}{key}.")
        elif isinstance(there, dict):
            raise ConfigError(f"{prefix}{key}: is a section, not a key")
        else:
            table[key] = value


def _resolve_paths(table: Table, folder: Path) -> None:
    for dotted in PATH_KEYS:
        section, name = dotted.split(".")
        for values in tables_of(table, section):
            given = values.get(name)
            if isinstance(given, list):
                values[name] = [_resolved(path, folder) for path in given]
            elif given:
                values[name] = _resolved(given, folder, links=dotted not in LINK_KEYS)
    bus = table.get("bus")
    url = bus.get("url") if isinstance(bus, dict) else None
    if isinstance(bus, dict) and isinstance(url, str) and url.startswith(_SQLITE):
        path = url.removeprefix(_SQLITE)
        bus["url"] = _SQLITE + (_resolved(path, folder) if path else "")


def _resolved(path: Any, folder: Path, *, links: bool = True) -> Any:
    """Resolve a path, with `links` also symbolic links; keep names of the hub and values that are
    no text."""
    if not isinstance(path, str) or not path or path.startswith(_HUB):
        return path
    try:
        absolute = folder / Path(path).expanduser()
        return str(absolute.resolve() if links else absolute.parent.resolve() / absolute.name)
    except (OSError, RuntimeError, ValueError) as error:  # a NUL, a user without a home
        raise ConfigError(f"{path!r} is not a path: {error}") from error


def _fill_in(table: Table, folder: Path) -> None:
    for task in tables_of(table, "task"):
        task["directory"] = task.get("directory") or str(folder)
    sampling, own_keys = table.get("sampling", {}), set(_fields(EvaluationSampling))
    table.setdefault("evaluation", {})
    for evaluation in tables_of(table, "evaluation"):
        own = evaluation.get("sampling", {})
        if isinstance(sampling, dict) and isinstance(own, dict):
            common = {key: sampling[key] for key in sampling.keys() & own_keys}
            evaluation["sampling"] = {**common, **own}


def _check_keys(table: Mapping[str, Any], section: type[Section], prefix: str) -> None:
    fields = _fields(section)
    for key, value in table.items():
        if key not in fields:
            fields = {name: its for name, its in fields.items() if name not in _MORE}
            what = "section" if isinstance(value, dict) and not prefix else "key"
            raise ConfigError(f"unknown {what} `{prefix}{key}`", hint=_hint(key, prefix, fields))
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, Section) and isinstance(value, Mapping):
            _check_keys(value, kind, f"{prefix}{key}.")
    if section is Config:
        for name, (more, several) in SEVERAL.items():
            given = table.get(more)
            for entry in given if isinstance(given, list | tuple) else ():
                if isinstance(entry, Mapping):
                    _check_keys(entry, several, f"{name}.")


@functools.cache
def _fields(section: type[Section]) -> Mapping[str, Any]:
    """Cache keys and types of a section: this is nine tenths of reading a configuration."""
    return {field.name: field.type for field in msgspec.structs.fields(section)}


def _check_objective(given: Any) -> None:
    if isinstance(given, Mapping) and isinstance(given.get("kind", ""), str):
        try:
            objectives.check_kind(given.get("kind", "grpo"))
        except ValueError as error:
            raise ConfigError(f"objective.{error}") from None
        for key in objectives.unused(given):
            raise ConfigError(
                objectives.why_unused(given, key), hint=objectives.hint_for(given, key)
            )


def _hint(key: str, prefix: str, fields: Mapping[str, Any]) -> str:
    if elsewhere_called := ELSEWHERE.get(key):
        return f"it is `{elsewhere_called}` here"
    elsewhere = [name for name in ALL_KEYS if name.rpartition(".")[2] == key]
    if elsewhere:
        return f"did you mean `{elsewhere[0]}`?"
    near = difflib.get_close_matches(key, fields, n=1)
    if near:
        return f"did you mean `{prefix}{near[0]}`?"
    partly = [name for name in fields if key in name or name in key]
    names = ", ".join(f"`{name}`" for name in partly or fields)
    return f"there is {names}" if len(partly or fields) == 1 else f"there are {names}"


def _all_keys(section: type[Section], prefix: str) -> Iterator[str]:
    for field in msgspec.structs.fields(section):
        if field.name in _MORE:
            continue
        yield f"{prefix}{field.name}"
        if isinstance(field.type, type) and issubclass(field.type, Section):
            yield from _all_keys(field.type, f"{prefix}{field.name}.")


ALL_KEYS: Final = tuple(_all_keys(Config, ""))


def _refusal(message: str) -> ConfigError:
    """Return msgspec's message with the key in front, and name patterns in words."""
    match = _AT.match(message)
    what, path = (match["what"], match["path"]) if match else (message, "")
    for section, (more, _) in SEVERAL.items():
        if indexed := re.fullmatch(rf"{more}\[(\d+)\](.*)", path):
            path = f"{section}[{int(indexed[1]) + 1}]{indexed[2]}"
    missing = _MISSING.match(what)
    if missing:
        return ConfigError(f"`{path}.{missing['key']}` is missing".replace("`.", "`"))
    if what.endswith(repr(PATTERN)):
        return ConfigError(f"{path}: not a name", hint=RULE)
    if unknown := _NO_CHOICE.match(what):
        hint = f"one of {', '.join(_choices(path))}"
        return ConfigError(f"{path}: unknown value `{unknown['value']}`", hint=hint)
    return ConfigError(f"{path}: {what[0].lower()}{what[1:]}" if path else what)


def _choices(path: str) -> list[str]:
    kind: Any = Config
    for name in re.sub(r"\[\d+\]", "", path).split("."):
        sections = (
            section
            for section in (kind, *typing.get_args(kind))
            if hasattr(section, "__annotations__")
        )
        kind = typing.get_type_hints(next(sections))[name]
    return [arg for arg in typing.get_args(kind) if isinstance(arg, str)]


def _is_plain(value: Any) -> bool:
    """Return whether JSON can hold the value; TOML also has dates, nan and inf."""
    if isinstance(value, Section):
        value = msgspec.to_builtins(value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -INTEGER_MAX <= value <= INTEGER_MAX
    return value is None or (isinstance(value, str) and _is_text(value))


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
