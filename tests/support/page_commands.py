"""Check of the commands on pages against the command line, the recipes and the configuration."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import typer
from typer.exceptions import TyperException

from dora_pipe.config.load import load_config
from dora_pipe.core.errors import DoraError
from tests.support.cli_words import parsed
from tests.support.tidy import ROOT

FOREIGN: Final = frozenset(
    {
        "$acls",
        "cat",
        "cd",
        "cosign",
        "docker",
        "echo",
        "export",
        "head",
        "jq",
        "kafka-configs.sh",
        "kafka-topics.sh",
        "kcat",
        "kubectl",
        "pip",
        "rsync",
        "ruff",
        "sbatch",
        "sha256sum",
        "sort",
        "source",
        "uniq",
        "uv",
    }
)
"""Programs of others; only paths among their arguments are checked."""

PLAIN: Final[dict[str, dict[str, Any]]] = {
    "run": {"name": "page", "steps": 1000},
    "model": {"path": "model"},
    "task": {"kind": "arithmetic"},
}
"""Sections that every configuration needs."""

_OWN_PATH = re.compile(r"(infra|examples|requirements|tests|launch)/[\w./-]+")
_SETTING = re.compile(r"[a-z_]+(\.\w+)+=.*", re.DOTALL)


def problem(words: Sequence[str], folder: Path) -> str:
    """Return what is wrong with a command of a page, or an empty string."""
    removed = [word for word in words if _OWN_PATH.fullmatch(word) and not (ROOT / word).exists()]
    if removed:
        return f"no {removed[0]}"
    match Path(words[0]).name, *words[1:]:
        case ["dora-pipe", *rest]:
            return _own_problem(rest, folder)
        case ["sudo", *rest]:
            return problem(rest, folder)
        case ["make", *rest]:
            return _recipe_problem(rest)
        case ["python" | "python3", *rest]:
            return _python_problem(rest)
    is_known = Path(words[0]).name in FOREIGN or (ROOT / words[0]).is_file()
    return "" if is_known else f"unknown program {words[0]}"


def _own_problem(words: Sequence[str], folder: Path) -> str:
    try:
        _, params = parsed(words)
    except typer.Exit:
        return ""
    except TyperException as error:
        return str(error)
    return settings_problem(params, words, folder)


def settings_problem(params: dict[str, Any], words: Sequence[str], folder: Path) -> str:
    """Return the error of the configuration that a command's `key=value` words give."""
    settings = [word for word in words if _SETTING.fullmatch(word)]
    named = params.get("config")
    own = ROOT / named if named else None
    path = own if own is not None and own.is_file() else folder / "plain.toml"
    return refusal(lambda: load_config(path, settings, another=True))


def refusal(load: Callable[[], object]) -> str:
    """Return the error and hint that a call raises, or an empty string."""
    try:
        load()
    except DoraError as error:
        return f"error: {error.message}\nhint: {error.hint}"
    return ""


@cache
def _recipes() -> dict[str, str]:
    text = (ROOT / "Makefile").read_text()
    return dict(re.findall(r"^([a-z][\w-]*):(.*\n(?:\t.*\n)*)", text, re.MULTILINE))


def _recipe_problem(words: Sequence[str]) -> str:
    source = ""
    for word in words:
        if "=" not in word:
            if word not in _recipes():
                return f"no recipe {word}"
            modules = re.findall(r"-m ([\w.]+)", _recipes()[word])
            source += "".join(map(_source, modules)) + _recipes()[word]
            continue
        name, _, value = word.partition("=")
        if f"{name} ?=" not in (ROOT / "Makefile").read_text():
            return f"no variable {name}"
        if "pytest" not in source and (unknown := _unknown(shlex.split(value), source)):
            return unknown
    return ""


def _python_problem(words: Sequence[str]) -> str:
    match words:
        case ["-m", module, *rest]:
            source = _source(module)
            if not source:
                return f"no module {module}"
            own = importlib.util.find_spec(module)
            foreign = own is None or "site-packages" in str(own.origin)
            return "" if foreign else _unknown(rest, source)
        case ["-c", code]:
            compile(code, "page", "exec")
            return ""
        case [path, *_] if (ROOT / path).exists():
            return ""
    return f"no program {words}"


@cache
def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    path = Path(spec.origin)
    files = path.parent.glob("*.py") if path.name == "__init__.py" else [path]
    return "".join(file.read_text() for file in files)


def _unknown(words: Sequence[str], source: str) -> str:
    options = (word.partition("=")[0] for word in words if word.startswith("--"))
    return next((f"no option {option}" for option in options if f'"{option}"' not in source), "")
