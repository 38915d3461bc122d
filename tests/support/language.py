"""Rules of plain English as functions from a text to hits, with a baseline per top folder.

`python -m tests.support.language` prints every hit; `--lower` writes counts that fell.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import tidy

BASELINE = Path(__file__).with_suffix(".json")
SUBJECTS, SUBJECT_CHARACTERS_MAX = 50, 72

_CLAUSE = re.compile(r"(What|Who|Whoever|Which|Where|Whatever|Whose)\b(?!.*\?\s*$)")
_OPENER = re.compile(
    r"(Of|But|With|For|So|None|Nobody|Nothing|That|Those|Whoever|Who|What|Whatever|Which|Where"
    r"|Whose|It|One|Such|As)\b"
)
_CALQUE = re.compile(
    r"\b((?i:anew|likewise|so many|so long as it|for ever|as ever|in one go|at its place|beside"
    r"|behind|be had|comes? to be|stands? (?:in|for|at|on|once|there|here)"
    r"|lies? (?:in|at|on|there|here|as)|goes on|go on|went on|lets? go of|let go|put down"
    r"|takes? its place|of its own accord|waits? since|more than one of)"
    r"|(?<!there )is none|(?<!there )are none)\b"
)
_NO_ACTOR = re.compile(
    r"\b(whoever|nobody|somebody|(?:is|are) (?:told|asked)|is said|promised by)\b", re.I
)
_VAGUE = frozenset(
    ("one", "found", "said", "told", "at", "some", "others", "whole", "wanted", "place", "gone")
) | {"left", "known", "seen", "made"}
_SUBJECT = re.compile(r"[a-z0-9][\w./, -]*: [a-z]")


class Hit(NamedTuple):
    rule: str
    line: int
    text: str


def hits(path: str, text: str) -> Iterator[Hit]:
    """Yield the hits of a Markdown or Python file."""
    yield from _markdown(text) if path.endswith(".md") else _python(path, text)


def subject_hits(subjects: list[str]) -> list[str]:
    """Return subjects that are too long or not of the form `area: imperative`."""
    return [
        subject
        for subject in subjects
        if len(subject) > SUBJECT_CHARACTERS_MAX
        or not _SUBJECT.match(subject)
        or ": what " in subject
    ]


def subjects() -> list[str]:
    """Return the subjects of the last commits, without merges; none outside a checkout."""
    if not (tidy.ROOT / ".git").exists():
        return []
    words = ["git", "log", "--no-merges", f"-{SUBJECTS}", "--format=%s"]
    done = subprocess.run(words, cwd=tidy.ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def counts() -> dict[str, dict[str, int]]:
    """Return the number of hits by folder and rule."""
    counter = Counter((folder, hit.rule) for folder, _, hit in _all())
    tree: dict[str, dict[str, int]] = {}
    for (folder, rule), count in sorted(counter.items()):
        tree.setdefault(folder, {})[rule] = count
    return tree


def differences(baseline: dict[str, dict[str, int]], now: dict[str, dict[str, int]]) -> list[str]:
    """Return the folders and rules whose count is not that of the baseline."""
    keys = sorted(
        {(folder, rule) for tree in (baseline, now) for folder in tree for rule in tree[folder]}
    )
    pairs = [(*key, _count(baseline, *key), _count(now, *key)) for key in keys]
    return [
        f"{folder}: {rule}: {count}, baseline {bound}; see python -m tests.support.language"
        + (" (add --lower to lower it)" if count < bound else "")
        for folder, rule, bound, count in pairs
        if count != bound
    ]


def lowered(
    baseline: dict[str, dict[str, int]], now: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    """Return the baseline with every count that fell; no count rises."""
    tree: dict[str, dict[str, int]] = {}
    for folder, rules in baseline.items():
        for rule, bound in rules.items():
            if count := min(bound, _count(now, folder, rule)):
                tree.setdefault(folder, {})[rule] = count
    return tree


def _count(tree: dict[str, dict[str, int]], folder: str, rule: str) -> int:
    return tree.get(folder, {}).get(rule, 0)


def _all() -> Iterator[tuple[str, Path, Hit]]:
    for path in tidy.files(".md", ".py"):
        if path.name == "CHANGELOG.md":
            continue
        folder = path.parts[0] if len(path.parts) > 1 else "."
        for hit in hits(str(path), (tidy.ROOT / path).read_text(encoding="utf-8")):
            yield folder, path, hit


def _phrases(line: int, text: str) -> Iterator[Hit]:
    for rule, pattern in (("calque", _CALQUE), ("actor", _NO_ACTOR)):
        for match in pattern.finditer(text):
            yield Hit(rule, line, f"{match.group()} | {text.strip()[:80]}")


def _markdown(text: str) -> Iterator[Hit]:
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            plain = re.sub(r"`[^`]*`", "", line)
            if line.startswith("#") and _CLAUSE.match(title := line.lstrip("# ")):
                yield Hit("title", number, title)
            yield from _phrases(number, plain)


def _python(path: str, text: str) -> Iterator[Hit]:
    documented = set()
    for node in tidy.nodes_of(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            documented |= {
                id(statement.value) for statement in node.body if isinstance(statement, ast.Expr)
            }
            if doc := ast.get_docstring(node):
                yield from _opener(getattr(node, "lineno", 1), doc)
        elif isinstance(node, ast.keyword) and node.arg == "help":
            yield from _opener(node.value.lineno, str(getattr(node.value, "value", "")))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in _VAGUE:
            yield Hit("name", node.lineno, node.id)
        elif isinstance(node, ast.arg) and node.arg in _VAGUE:
            yield Hit("name", node.lineno, node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Strings of tests are data, except docstrings.
            shown = id(node) in documented or not path.startswith("tests/")
            yield from _phrases(node.lineno, node.value) if shown else ()
    for number, line in enumerate(text.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)#\s+(.*)$", line):
            yield from _phrases(number, comment.group(1))


def _opener(line: int, text: str) -> Iterator[Hit]:
    first = text.partition("\n")[0]
    if _OPENER.match(first):
        yield Hit("opener", line, first)


def main() -> None:
    if "--lower" in sys.argv:
        baseline = json.loads(BASELINE.read_text())
        BASELINE.write_text(json.dumps(lowered(baseline, counts()), indent=1) + "\n")
        return
    for _, path, hit in _all():
        print(f"{path}:{hit.line}: {hit.rule}: {hit.text}")  # noqa: T201


if __name__ == "__main__":
    main()
