"""Tests of the command line: size, help examples, quoted commands."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from dora_pipe.cli.app import COMMANDS, app
from tests.support.cli_reference import page
from tests.support.cli_words import parsed
from tests.support.command_line import Call
from tests.support.tidy import ROOT

COMMANDS_MAX = 34
PAGES = ("*.md", "*.py", "*.toml", "*.yml", "*.yaml", "*.sh", "Makefile", "Dockerfile")
HISTORY = ("CHANGELOG.md", "bench/results/", "tests/fuzz/corpus/")
"""Files that quote commands of earlier commits."""

NOT_COMMANDS = frozenset({"batch", "kv", "transfers"})
"""Words after the name in binary prefixes."""

_TYPED = re.compile(r"(?:[`\"'(]|\$ )dora-pipe (?P<words>[^`\"'\n|;&>]+)")
_OPTION = re.compile(r"--?[a-z][a-z-]*$")


def _leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield words, command
        return
    for name in inner:
        yield from _leaves(inner[name], (*words, name))


LEAVES = [*_leaves(get_command(app))]


def test_the_top_level_has_few_commands() -> None:
    assert sum(map(len, COMMANDS.values())) <= COMMANDS_MAX


@pytest.mark.parametrize("words", [words for words, _ in LEAVES], ids=" ".join)
def test_help_has_an_example_that_parses(words: tuple[str, ...], call: Call) -> None:
    code, shown, _ = call(*words, "--help")
    examples = re.findall(r"^ +dora-pipe (.*)$", shown, re.MULTILINE)
    assert code == 0 and examples
    for example in examples:
        typed = shlex.split(example)
        assert tuple(typed[: len(words)]) == words
        assert parsed(typed)[0] == words[-1]


def _quoted() -> Iterator[tuple[str, str]]:
    """Yield (file, words after `dora-pipe`) of each command in pages, hints and manifests."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *PAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.split():
        if name.startswith((*HISTORY, "sim/")) or not (ROOT / name).is_file():
            continue
        for match in _TYPED.finditer((ROOT / name).read_text()):
            yield name, match["words"].partition(" #")[0]


def _unknown(typed: str) -> str:
    """Return the first unknown word of a command, or an empty string."""
    command: Any = get_command(app)
    words = typed.split()
    while words and hasattr(command, "commands"):
        if words[0].startswith("-") or not re.fullmatch(r"[a-z-]+", words[0]):
            break
        word = words.pop(0)
        if word not in command.commands:
            return "" if word in NOT_COMMANDS else word
        command = command.commands[word]
    known = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    options = (word.partition("=")[0].rstrip(".,:)") for word in words)
    return next(
        (one for one in options if _OPTION.match(one) and one not in known | {"--help"}), ""
    )


def test_the_page_is_what_the_code_writes() -> None:
    command = "python -m tests.support.cli_reference > docs/reference/cli.md"
    assert (ROOT / "docs" / "reference" / "cli.md").read_text() == page(), f"run: {command}"


def test_every_command_and_option_that_is_named_exists() -> None:
    quoted = [*_quoted()]
    assert len(quoted) > 100
    wrong = [(name, typed) for name, typed in quoted if _unknown(typed)]
    assert wrong == []


def test_version_names_the_versions_and_does_not_import_torch(call: Call) -> None:
    code, shown, _ = call("--version")
    assert code == 0
    assert re.fullmatch(r"dora-pipe \S+( \(commit \w+\))?, Python [\d.]+, torch .+\n", shown)
