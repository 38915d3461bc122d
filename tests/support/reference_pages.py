"""Generate the tables of docs/reference: metrics, SQL tables.

``python -m tests.support.reference_pages`` rewrites the pages after their marker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from dora_pipe.ledger.tables import CALLS, TABLES, columns_of
from dora_pipe.observe.metrics import table
from dora_pipe.observe.metrics.metric import Metric
from tests.support.tidy import ROOT

MARKER: Final = "<!-- Written by `python -m tests.support.reference_pages`. -->"

SECTIONS: Final[Mapping[str, Sequence[Metric]]] = {
    "Run": table.RUN,
    "Roles": table.ROLES,
    "Workers": table.WORKERS,
    "Groups and trajectories": table.GROUPS,
    "Training": table.TRAINING,
    "Bus": table.BUS,
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"
    yield ""


def metrics() -> Iterator[str]:
    """Yield the metrics by section."""
    for title, section in SECTIONS.items():
        yield from (f"## {title}", "")
        rows = [
            (f"`{one.full}`", one.kind, ", ".join(f"`{name}`" for name in one.labels), one.meaning)
            for one in section
        ]
        yield from _table(("metric", "type", "labels", "meaning"), rows)


def tables() -> Iterator[str]:
    """Yield the SQL tables."""
    for one in (*TABLES, CALLS):
        yield from (f"### {one.name}", "", one.description, "")
        rows = [
            (
                f"`{column.name}`",
                column.sql.lower() + (", null" if column.null else ""),
                column.description,
            )
            for column in columns_of(one.row)
        ]
        yield from _table(("column", "type", "meaning"), rows)


PAGES: Final[Mapping[str, Callable[[], Iterator[str]]]] = {"metrics": metrics, "sql": tables}


def page(name: str, text: str) -> str:
    """Return a page with its part after the marker written anew."""
    return text.partition(MARKER)[0] + MARKER + "\n\n" + "\n".join(PAGES[name]())


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / "docs/reference" / f"{name}.md"
        path.write_text(page(name, path.read_text()))
