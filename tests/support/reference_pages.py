"""Generator of reference pages; ``python -m tests.support.reference_pages`` rewrites them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dora_pipe.ledger.tables import CALLS, TABLES, columns_of
from dora_pipe.observe.metrics import table
from tests.support.tidy import ROOT

MARKER = "<!-- Written by `python -m tests.support.reference_pages`. -->"
SECTIONS = {
    "Run": table.RUN,
    "Roles": table.ROLES,
    "Workers": table.WORKERS,
    "Groups and trajectories": table.GROUPS,
    "Training": table.TRAINING,
    "Bus": table.BUS,
}


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield from (title, "")
    yield from (f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
    yield ""


def _metrics() -> Iterator[str]:
    for title, section in SECTIONS.items():
        labels = [", ".join(f"`{name}`" for name in one.labels) for one in section]
        rows = [
            (f"`{one.full}`", one.kind, own, one.meaning)
            for one, own in zip(section, labels, strict=True)
        ]
        yield from _table(f"## {title}", ("metric", "type", "labels", "meaning"), rows)


def _tables() -> Iterator[str]:
    for one in (*TABLES, CALLS):
        rows = [
            (f"`{own.name}`", own.sql.lower() + ", null" * own.null, own.description)
            for own in columns_of(one.row)
        ]
        title = f"### {one.name}\n\n{one.description}"
        yield from _table(title, ("column", "type", "meaning"), rows)


PAGES = {"metrics": _metrics, "sql": _tables}


def page(name: str) -> tuple[str, str]:
    text = (ROOT / "docs/reference" / f"{name}.md").read_text()
    return text, f"{text.partition(MARKER)[0]}{MARKER}\n\n" + "\n".join(PAGES[name]())


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / "docs/reference" / f"{name}.md").write_text(page(name)[1])
