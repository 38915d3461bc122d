"""Tests of the command line: size, help examples, commands and keys that files name."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from typer.main import get_command

from dora_pipe import __version__
from dora_pipe.cli.app import COMMANDS, app
from dora_pipe.config.load import ALL_KEYS
from dora_pipe.config.model import Config
from dora_pipe.schemas.topics import Topics
from tests.support.cli_words import parsed
from tests.support.command_line import Call
from tests.support.tidy import ROOT

COMMANDS_MAX = 30
PAGES = ("*.md", "*.py", "*.toml", "*.yml", "*.yaml", "*.sh", "Makefile", "Dockerfile")
HISTORY = ("CHANGELOG.md", "bench/results/", "tests/fuzz/corpus/")
"""Files that quote commands of earlier commits."""

SECTIONS = [name for name in Config.__struct_fields__ if not name.startswith("more_")]

NOT_COMMANDS = frozenset({"batch", "kv", "transfers"})
"""Words after the name in binary prefixes."""

NOT_KEYS = frozenset(
    {"model.safetensors", "model.scores", "run.at_ns", "run.learner", "run.log", "run.orchestrator"}
    | {"run.trainer", "task.description", "task.seconds", "trainer.reference"}
)
"""Files, attributes and topics with the name of a section in front."""

_TYPED = re.compile(r"(?:^|[`\"'(]|\$ )dora-pipe (?P<words>[^`\"'\n|;&>]+)")
_KEY = re.compile(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})(?:\.[a-z_][a-z_0-9]*)+(?![\w(./-])")
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


@cache
def _texts() -> list[tuple[str, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "--", *PAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    results = []
    for name in listed.stdout.split():
        if not name.startswith((*HISTORY, "sim/", "tests/")) and (ROOT / name).is_file():
            text = (ROOT / name).read_text()
            results += [
                (name, entry)
                for entry in (_strings(text) if name.endswith(".py") else [f" {text}"])
            ]
    return results


def _strings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (
                value.value if isinstance(value, ast.Constant) else "{}" for value in node.values
            )
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _unknown(typed: str) -> str:
    command: Any = get_command(app)
    words = typed.split()
    while words and hasattr(command, "commands"):
        if words[0].startswith("-") or not re.fullmatch(r"[a-z-]+", words[0]):
            break
        word = words.pop(0)
        if word not in command.commands:
            return "" if word in NOT_COMMANDS else word
        command = command.commands[word]
    params = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    options = (word.partition("=")[0].rstrip(".,:)") for word in words)
    return next(
        (
            option
            for option in options
            if _OPTION.match(option) and option not in params | {"--help"}
        ),
        "",
    )


def test_every_command_and_option_that_is_named_exists() -> None:
    quoted = [
        (name, match["words"].partition(" #")[0])
        for name, text in _texts()
        for match in _TYPED.finditer(text)
    ]
    assert len(quoted) > 100
    assert [(name, typed) for name, typed in quoted if _unknown(typed)] == []


def test_every_configuration_key_that_is_named_exists() -> None:
    named = {(name, key) for name, text in _texts() for key in _keys(name, text)}
    assert len(named) > 300
    assert sorted((name, key) for name, key in named if not _is_key(key)) == []


def _keys(name: str, text: str) -> Iterator[str]:
    quoted = re.findall(r"`([^`\n]+)`", text) if name.endswith(".md") else [text]
    if name.endswith((".py", ".md")) and name != "docs/migration.md":
        yield from (key for entry in quoted for key in _KEY.findall(entry))


def _is_key(name: str) -> bool:
    free = (
        "task.options.",
        "objective.options.",
        "workers.vllm.args.",
        "task.columns.",
        "model.embed_tokens.",
        "model.norm.",
        "model.safetensors.",
    )
    topics = {topic for topic in Topics("run").all()}
    other = name in NOT_KEYS | topics or name.endswith((".toml", ".yaml", ".js"))
    return (
        name in ALL_KEYS
        or other
        or name.startswith(free)
        or (ROOT / f"{name.replace('.', '/')}.py").is_file()
    )


def test_version_is_the_one_of_the_package(call: Call) -> None:
    assert call("--version")[:2] == (0, f"dora-pipe {__version__}\n")
