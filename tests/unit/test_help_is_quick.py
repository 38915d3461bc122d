"""Tests that help and usage errors import nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys

from typer.main import get_command

from dora_pipe.audit.prune import AGE_MIN_S
from dora_pipe.cli.app import app
from dora_pipe.cli.options import BLOB_HOURS

OWN = frozenset(
    f"dora_pipe{one}"
    for one in (
        "",
        ".cli",
        ".cli.app",
        ".cli.commands",
        ".cli.commands.audit",
        ".cli.commands.analysis",
        ".cli.commands.control",
        ".cli.commands.export",
        ".cli.commands.log",
        ".cli.commands.machine",
        ".cli.commands.observe",
        ".cli.commands.start",
        ".cli.lazy",
        ".cli.main",
        ".cli.options",
        ".cli.output",
        ".cli.progress",
        ".core",
        ".core.errors",
        ".core.system",
        ".core.system.console",
        ".core.system.proxies",
    )
)
"""Our modules for arguments and output."""

SLOW = frozenset({"asyncio", "multiprocessing", "sqlite3", "unittest", "xml"})
"""Standard library modules."""

ASK = """
import io, json, sys
from pathlib import Path
from typing import Annotated
import typer

lines = json.loads(sys.argv[1])

def tried(main, words):
    sys.argv = ["dora-pipe", *words]
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0

said, sys.stdout, sys.stderr = sys.stderr, io.StringIO(), io.StringIO()
bare = typer.Typer(rich_markup_mode=None)
@bare.command()
def empty(one: Path, two: Annotated[float, typer.Option(min=1)] = 1, three: bool = False) -> None:
    pass
for words in (["--help"], ["--none"], ["a", "--two", "0"], ["a"]):
    tried(bare, words)
typers = set(sys.modules)
from dora_pipe.cli.main import main
codes = [tried(main, words) for words in lines]
print(json.dumps([codes, sorted(set(sys.modules) - typers)]), file=said)
"""


def asked(*lines: list[str]) -> tuple[list[int], set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(lines)], capture_output=True, text=True, check=True
    )
    codes, modules = json.loads(done.stderr)
    return codes, set(modules)


def heavy(modules: set[str]) -> set[str]:
    packages = {module: module.partition(".")[0] for module in modules - OWN}
    light = sys.stdlib_module_names - SLOW
    return {entry for entry, package in packages.items() if package not in light}


def every_command() -> list[list[str]]:
    results: list[list[str]] = []

    def walk(command: object, words: list[str]) -> None:
        results.append(words)
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, [*words, name])

    walk(get_command(app), [])
    return results


def test_help_of_every_command_imports_nothing_heavy() -> None:
    commands = every_command()
    assert len(commands) > 40
    codes, modules = asked(*([*words, "--help"] for words in commands))
    assert codes == [0] * len(commands)
    assert heavy(modules) == set()


def test_errors_of_usage_import_nothing_heavy() -> None:
    wrong = [[*words, "--no-such-option"] for words in every_command()]
    wrong += [["shwo"], ["why"], ["log", "topics"], ["run", "--steps", "many"]]
    wrong += [["top", "r", "--every", "0"], ["ui", "r", "--port", "-1"], ["export", "r"]]
    wrong += [["why", "r", "--summary", "--step", "1"], ["audit", "r", "--follow", "--json"]]
    wrong += [["run", "a.toml", "--resume", "--from", "r@1"]]
    codes, modules = asked(*wrong)
    assert codes == [2] * len(wrong)
    assert heavy(modules) == set()


def test_what_help_says_of_parts_that_it_does_not_import_is_what_they_are() -> None:
    assert AGE_MIN_S / 3600 == BLOB_HOURS
