"""The tables of a GPU report, as the page about GPUs has them between two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

BEGIN: Final = "<!-- figures: python -m dora_pipe.bench.gpu_report --page -->"
END: Final = "<!-- end of figures -->"
NOWHERE: Final = "No GPU has been reported on."
NOT_RUN: Final = "not run"


def write_page(page: Path, folder: Path, pieces: Mapping[str, str]) -> None:
    """Put the folder's tables between the marks of a page; `pieces` are all, with what they are."""
    page.write_text(with_figures(page.read_text(), outcomes_of(folder), pieces))


def with_figures(
    text: str, outcomes: Sequence[Mapping[str, Any]], pieces: Mapping[str, str]
) -> str:
    """A page's text with these tables between its marks, of which it has one pair."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{tables(outcomes, pieces)}\n{END}{after}"


def outcomes_of(folder: Path) -> list[dict[str, Any]]:
    """The JSON files of a report, the oldest first."""
    found = [
        msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        for path in sorted(folder.glob("*.json"))
    ]
    return sorted(found, key=lambda one: (one["date"], one["piece"]))


def tables(outcomes: Sequence[Mapping[str, Any]], pieces: Mapping[str, str]) -> str:
    """What ran where, every piece in a line, also one that has not run, and the figures of each;
    markdown."""
    if not outcomes:
        return NOWHERE + "\n"
    found = {one["piece"] for one in outcomes}
    absent = [
        {"piece": f"`{name}`", "what": what, "": NOT_RUN}
        for name, what in pieces.items()
        if name not in found
    ]
    machines = dict.fromkeys(_machine(one) for one in outcomes)
    lines = [
        *(f"{one}\n" for one in machines),
        *_table([*map(_summary, outcomes), *absent]),
    ]
    for one in outcomes:
        if one["figures"]:
            lines += ["", f"**{one['piece']}**: {one['what']}.", "", *_table(one["figures"])]
    return "\n".join(lines) + "\n"


def _machine(one: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
    card = f"{one['card'] or 'CPU'}, driver {one['driver'] or 'none'}"
    return f"{one['date'][:10]}: {card}; {packages}; commit {one['commit']}."


def _summary(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "piece": f"`{one['piece']}`",
        "what": one["what"],
        "": one["state"],
        "s": round(one["seconds"]) or None,
        "said": one["said"],
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table without the columns that say nothing in any row, or more than a cell holds."""
    said = [
        name
        for row in rows
        for name, cell in row.items()
        if cell not in (None, "", False) and not isinstance(cell, list | dict)
    ]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name in said]
    head = [f"| {' | '.join(names)} |", "|" + " --- |" * len(names)]
    return [*head, *(f"| {' | '.join(_cell(row.get(name)) for name in names)} |" for row in rows)]


def _cell(value: Any) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return "yes"
    if isinstance(value, int):
        return f"{value:,}".replace(",", " ")
    return str(value)
