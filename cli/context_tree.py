"""A trajectory's contexts as a tree for people: each below the one that it begins as, with the
calls that were answered in it. It decides the words; `--json` has the figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from dora_pipe.cli.output import show
from dora_pipe.observe.text import duration
from dora_pipe.observe.traces.tree import stems

Row = Mapping[str, Any]

COLUMNS: Final = ("context", "asked ms", "took ms", "sampled", "")
DROP: Final = ("asked ms", "took ms")
"""Columns that go where a terminal is too narrow."""


def context_tree(
    contexts: Sequence[Row], calls: Sequence[Row], *, plain: bool
) -> list[tuple[str, ...]]:
    """The sections `contexts` and `calls` of a description as rows of `COLUMNS`, the first with the
    lines of a tree; `plain`: of ASCII alone."""
    rows = list(_in_order(contexts, calls))
    lines = stems([level for level, _ in rows], plain=plain)
    return [(stem + cells[0], *cells[1:]) for stem, (_, cells) in zip(lines, rows, strict=True)]


def _in_order(
    contexts: Sequence[Row], calls: Sequence[Row]
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Each context's level and cells, then those of its calls, then what begins as it does."""
    below: dict[int | None, list[Row]] = {}
    for one in contexts:
        below.setdefault(one["parent"], []).append(one)
    answered: dict[int, list[Row]] = {}
    for one in calls:
        answered.setdefault(one["context"], []).append(one)
    left = [(0, one) for one in reversed(below.get(None, []))]
    while left:
        level, context = left.pop()
        yield level, _context(context)
        for call in answered.get(context["context"], []):
            yield level + 1, _call(call)
        children = below.get(context["context"], [])
        left += [(level + 1, one) for one in reversed(children)]


def _context(one: Row) -> tuple[str, ...]:
    said = f"{one['tokens']} tokens"
    if one["parent"] is not None:
        said += f", the first {one['shared']} of context {one['parent']}"
    return f"context {one['context']}", "", "", show(one["sampled"]), said


def _call(one: Row) -> tuple[str, ...]:
    said = [f"after {one['prompt tokens']} tokens"]
    if one["finish"] != "stop":
        said.append(one["finish"])
    if one["idle before ms"]:
        said.append(f"no call was open for {duration(one['idle before ms'] / 1000)} before")
    if one["again"]:
        said.append(f"asked {one['again']} times before")
    if one["api"] not in (None, "chat"):
        said.append(one["api"])
    if one["asked for"]:
        said.append(f"asked for {one['asked for']}")
    by = f" by {one['caller']}" if one["caller"] else ""
    times = (show(one[name]) for name in ("asked ms", "took ms", "tokens"))
    return f"call {one['call']}{by}", *times, "; ".join(said)
