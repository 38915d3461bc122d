"""Code size: lines by folder, small modules, repeated class names.

    python -m tests.support.size

Code excludes blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.tidy import ROOT, files

SMALL_LINES = 60
"""Threshold of small modules."""

REPEATED = 3
"""Files with the same class name that are reported."""

NOT_INSTALLED = ("bench", "docs", "examples", "infra", "tests")
LIFE = ROOT / "docs" / "architecture.md"


@dataclass(frozen=True, slots=True)
class Size:
    files: int
    lines: int
    code: int

    def __add__(self, other: Size) -> Size:
        return Size(self.files + other.files, self.lines + other.lines, self.code + other.code)


NOTHING = Size(0, 0, 0)


def modules() -> list[Path]:
    return files(".py")


@cache
def size_of(path: Path) -> Size:
    text = (ROOT / path).read_text()
    prose = _docstring_lines(ast.parse(text))
    code = [
        number
        for number, line in enumerate(text.splitlines(), 1)
        if number not in prose and line.strip() and not line.lstrip().startswith("#")
    ]
    return Size(1, text.count("\n"), len(code))


def _docstring_lines(tree: ast.Module) -> set[int]:
    result: set[int] = set()
    for node in ast.walk(tree):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            result.update(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return result


def by_folder() -> dict[str, Size]:
    sizes: dict[str, Size] = {}
    for path in modules():
        depth = 2 if path.parts[0] == "tests" else 1
        name = "/".join(path.parts[:-1][:depth]) or "."
        sizes[name] = sizes.get(name, NOTHING) + size_of(path)
    return sizes


def total(sizes: dict[str, Size], folders: Iterable[str] | None = None) -> Size:
    chosen = None if folders is None else set(folders)
    total = NOTHING
    for name, size in sizes.items():
        top = name.partition("/")[0]
        if top in chosen if chosen is not None else top not in NOT_INSTALLED:
            total += size
    return total


def small_modules() -> list[str]:
    return [
        str(path)
        for path in modules()
        if path.parts[0] not in NOT_INSTALLED
        and path.name != "__init__.py"
        and size_of(path).lines < SMALL_LINES
    ]


def repeated_classes() -> dict[str, int]:
    names: Counter[str] = Counter()
    for path in modules():
        if path.parts[0] not in NOT_INSTALLED:
            tree = ast.parse((ROOT / path).read_text())
            names.update({node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)})
    return {name: count for name, count in sorted(names.items()) if count >= REPEATED}


def life() -> list[Path]:
    """Return the files of docs/architecture.md, in order, each once."""
    named = re.findall(r"\(\.\./([\w/]+\.py)\)", LIFE.read_text())
    return [Path(name) for name in dict.fromkeys(named)]


def report() -> str:
    sizes = by_folder()
    named = {
        **dict(sorted(sizes.items())),
        "installed": total(sizes),
        "with benches": total(sizes) + total(sizes, ["bench"]),
        "tests, all of them": total(sizes, ["tests"]),
    }
    lines = [f"{'folder':24}{'files':>7}{'lines':>9}{'code':>9}"]
    for name, size in named.items():
        lines.append(f"{name:24}{size.files:>7}{size.lines:>9}{size.code:>9}")
    way = life()
    steps = sum(size_of(path).lines for path in way)
    lines += [
        "",
        f"modules below {SMALL_LINES} lines: {len(small_modules())}",
        f"class names in {REPEATED} modules or more: {_named(repeated_classes())}",
        f"life of a trajectory: {len(way)} files, {steps} lines",
    ]
    return "\n".join(lines)


def _named(names: dict[str, int]) -> str:
    return f"{len(names)} ({', '.join(names)})"


if __name__ == "__main__":
    print(report())  # noqa: T201
