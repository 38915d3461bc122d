"""Code blocks of the pages, and the commands in their console blocks."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from sybil.document import Document
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tests.support import tidy

PAGES: Final = tuple(
    str(path)
    for path in tidy.files(".md")
    if str(path) in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
    or re.fullmatch(r"(docs(/reference)?/\w[\w-]*|examples/.*/README)\.md", str(path))
)

LIMIT_S: Final = 120

_PROMPT = re.compile(r"^[\w-]*\$ ")
_BLOCKS = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)\n"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """Line typed at a prompt, with the output that the page shows."""

    line: str
    shown: tuple[str, ...] = ()

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command, without environment variables and comments."""
        words: list[str] = []
        for word in (*_split(self.line), ";"):
            if word.strip("|&;"):
                words.append(word)
                continue
            while words and re.match(r"\w+=", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []


def _split(line: str) -> Iterator[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    yield from lexer


@cache
def blocks(page: str) -> tuple[Block, ...]:
    """Return the code blocks of a page in order."""
    document = Document((tidy.ROOT / page).read_text(), page)
    return tuple(
        Block(
            page=page,
            line=document.text.count("\n", 0, region.start) + 1,
            language=region.lexemes["language"].strip(),
            text=str(region.lexemes["source"]),
        )
        for region in _BLOCKS(document)
    )


def block(language: str, fragment: str) -> str:
    """Return the only block of a language, on any page, that contains a fragment."""
    every = (block for page in PAGES for block in blocks(page))
    (text,) = {
        entry.text for entry in every if entry.language == language and fragment in entry.text
    }
    return text


def typed(text: str) -> list[Typed]:
    results: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if _PROMPT.match(line):
            results.append((_PROMPT.sub("", line), []))
        elif results and results[-1][0].endswith("\\"):
            results[-1] = (results[-1][0][:-1] + line.strip(), [])
        elif results:
            results[-1][1].append(line)
    return [Typed(line=line, shown=tuple(shown)) for line, shown in results]


def every_typed() -> Iterator[Typed]:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "console":
                yield from typed(block.text)


def console(fragment: str) -> list[Typed]:
    """Return the typed lines of the only console block with a fragment."""
    return typed(block("console", fragment))


def run(line: str, folder: Path, replaced: Mapping[str, str], path: str) -> str:
    """Run a line in a shell, with texts replaced, and return what it prints."""
    for old, new in replaced.items():
        line = line.replace(old, new)
    done = subprocess.run(
        ["bash", "-euc", line],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), "LC_ALL": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def within(words: Sequence[str], *, group: str, trajectory: str, last: int) -> list[str]:
    """Replace identifiers and steps of a page's run by those of a run with `last` steps."""
    steps = sorted({int(word) for word in words if word.isdecimal()}, reverse=True)
    smaller = {"N": str(last)}
    if steps and steps[0] > last:
        smaller |= {str(step): str(last - index) for index, step in enumerate(steps)}
    return [
        re.sub(
            r"g\d{10}(?!-)", group, re.sub(r"g\d{10}-\d{3}", trajectory, smaller.get(word, word))
        )
        for word in words
    ]


def missing_lines(shown: Sequence[str], printed: str) -> list[str]:
    """Return shown lines that were not printed. `...` matches any text. A line with figures or in a
    frame and the value after a label are not compared."""
    lines = printed.splitlines()
    labels = {_cells(line)[0] for line in lines if line.strip()}
    stable = [line for line in shown if re.match(r"[^\s.\d╭│╰━][^\d]*$", line)]
    return [
        line
        for line in stable
        if not matches(line, lines) and not (len(_cells(line)) == 2 and _cells(line)[0] in labels)
    ]


def matches(shown: str, printed: Sequence[str]) -> bool:
    """Return whether a line was printed; `...` matches any text, spaces any spaces."""
    pattern = ".*".join(map(re.escape, " ".join(shown.split()).split("...")))
    return any(re.fullmatch(pattern, " ".join(line.split())) for line in printed)


def _cells(line: str) -> list[str]:
    return re.split(r"  +", line.strip())
