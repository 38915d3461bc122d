"""Generator of reference pages; ``python -m tests.support.reference_pages`` rewrites them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dora_pipe.ledger.tables import CALLS, TABLES, columns_of
from dora_pipe.observe.metrics import table
from tests.support import cli_reference, config_reference, records_reference
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


def _metrics() -> Iterator[str]:
    for title, section in SECTIONS.items():
        yield from (f"## {title}", "")
        for metric in section:
            labels = (
                f" by {', '.join(f'`{name}`' for name in metric.labels)}" if metric.labels else ""
            )
            yield f"- `{metric.full}` {metric.kind}{labels}: {metric.meaning}"
        yield ""


def _tables() -> Iterator[str]:
    for entry in (*TABLES, CALLS):
        yield from (f"### {entry.name}", "", entry.description, "")
        for own in columns_of(entry.row):
            yield f"- `{own.name}` {own.sql.lower()}{', null' * own.null}: {own.description}"
        yield ""


LISTS = {"metrics": _metrics, "records": records_reference.lines, "sql": _tables}
WHOLE = {"cli": cli_reference.page, "configuration": config_reference.page}
PAGES = (*LISTS, *WHOLE)


def page(name: str) -> tuple[str, str]:
    """Return the text of a page, and the text that it should have."""
    text = (ROOT / "docs/reference" / f"{name}.md").read_text()
    if name in WHOLE:
        return text, re.sub(r"docs/([a-z-]+)\.md", r"[\1](../\1.md)", WHOLE[name]())
    return text, f"{text.partition(MARKER)[0]}{MARKER}\n\n" + "\n".join(LISTS[name]())


if __name__ == "__main__":
    for name in PAGES:
        (ROOT / "docs/reference" / f"{name}.md").write_text(page(name)[1])
