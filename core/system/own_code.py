"""Import of user code by `module:attribute`, with its location and digest; optional packages."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final, TypeVar

from dora_pipe.core.errors import MESSAGE_CHARACTERS_MAX, ConfigError, DoraError, one_line

T = TypeVar("T")

TRACEBACK_LINES_MAX: Final = 60

_BROKEN: Final = (
    ImportError,
    SyntaxError,
    NameError,
    AttributeError,
    TypeError,
    ValueError,
    OSError,
)
"""Import errors of user code."""

_LIBRARY: Final = str(Path(os.__file__).parent)
_INSTALLED: Final = re.compile(r"/(site|dist)-packages/")


def raised_at(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback, or empty.

    Lines of installed packages count only without others. Example: ``raised_at(error) ==
    "rewards.py:12"``
    """
    installed, own = "", ""
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] == "dora_pipe":
            continue
        if _INSTALLED.search(file):
            installed = f"{Path(file).name}:{line}"
        elif not file.startswith((_LIBRARY, "<")):
            own = f"{Path(file).name}:{line}"
    return own or installed


def with_place(error: BaseException) -> str:
    """Return the error with its location: ``"rewards.py:12: list index out of range"``."""
    location = raised_at(error)
    return f"{location}: {error}" if location else str(error)


def traceback_of(error: BaseException) -> str:
    """Return a shortened traceback."""
    lines = "".join(traceback.format_exception(error)).splitlines()
    if len(lines) > TRACEBACK_LINES_MAX:
        half = TRACEBACK_LINES_MAX // 2
        lines = [*lines[:half], f"... {len(lines) - 2 * half} lines ...", *lines[-half:]]
    return "".join(f"{one_line(line, MESSAGE_CHARACTERS_MAX)}\n" for line in lines)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return ``did you mean `jsonl`?``, or None."""
    near = difflib.get_close_matches(name, list(names), n=1)
    return f"did you mean `{near[0]}`?" if near else None


@contextmanager
def importable(directory: str) -> Iterator[None]:
    """Import from this folder first during the block; empty: no effect."""
    if not directory:
        yield
        return
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        sys.path.remove(directory)


def load_attribute(key: str, reference: str, error: type[DoraError] = ConfigError) -> Any:
    """Import the object of `module:attribute`.

    `key` is the configuration key for messages. Raises ConfigError for a malformed reference,
    `error` if the import fails.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise ConfigError(
            f"{key}: `{reference}` is not of the form module:attribute",
            hint='for instance "rewards:score" for the function `score` of rewards.py',
        )
    try:
        target: Any = importlib.import_module(module_name)
    except _BROKEN as reason:
        raise error(
            f"{key}: cannot import `{module_name}`: {reason}",
            hint="modules are looked for in task.directory first, by default the folder of the"
            " configuration file",
        ) from reason
    for part in attribute.split("."):
        if not hasattr(target, part):
            public = [name for name in vars(target) if not name.startswith("_")]
            raise error(f"{key}: `{module_name}` has no `{attribute}`", hint=nearest(part, public))
        target = getattr(target, part)
    return target


def load_function(key: str, reference: str, error: type[DoraError] = ConfigError) -> Any:
    """Import a callable. Raises `error`."""
    function = load_attribute(key, reference, error)
    if not callable(function):
        raise error(f"{key}: `{reference}` is not a function")
    return function


def load_kind(
    key: str, name: str, kind: type[T], built_in: Mapping[str, T], *, directory: str, hint: str
) -> T:
    """Return a built-in kind, or that of a module in `directory`. Raises ConfigError."""
    if name in built_in:
        return built_in[name]
    if ":" not in name:
        own = f"one of {', '.join(built_in)}, or module:attribute of your own"
        raise ConfigError(f"{key}: there is no `{name}`", hint=nearest(name, built_in) or own)
    with importable(directory):
        loaded = load_attribute(key, name)
    if not isinstance(loaded, kind):
        what = f"`{name}` is a {type(loaded).__name__}, expected {kind.__name__}"
        raise ConfigError(f"{key}: {what}", hint=hint)
    return loaded


def need_packages(who: str, packages: Iterable[str], hint: str) -> None:
    """Raise ConfigError if a package is missing."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"{who} needs {name}, which is not installed", hint=hint or None)


def source_sha256(reference: str) -> str:
    """Return the sha256 of an imported module's file."""
    file = sys.modules[reference.partition(":")[0]].__file__
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
