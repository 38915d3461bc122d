"""Tests of links and anchors inside the repository."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.support import tidy

PAGES = [path for path in tidy.files(".md") if path.parts[0] != "tests"]
"""Pages; texts in `tests` are sections of pages in docs/."""
LINK = re.compile(r"\]\((?P<path>[^)\s#]*)(?:#(?P<heading>[^)\s]+))?\)")


@cache
def headings(page: Path) -> frozenset[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.*)$", text, re.M)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return frozenset(client.replace(" ", "-") for client in plain)


def broken_links(page: Path) -> list[str]:
    here = tidy.ROOT / page
    broken = []
    for result in LINK.finditer(here.read_text()):
        path, heading = result["path"], result["heading"]
        if ":" in path:
            continue  # web link
        target = here.parent / path if path else here
        there = target.exists() and (
            not heading or target.suffix != ".md" or heading in headings(target)
        )
        if not there:
            broken.append(f"{page}: {result[0]}")
    return broken


def test_every_link_of_a_page_leads_somewhere() -> None:
    assert len(PAGES) > 50
    assert [line for page in PAGES for line in broken_links(page)] == []


def test_every_module_that_a_page_names_by_its_path_is_there() -> None:
    pages = [page for page in PAGES if page.parts[0] == "docs"]
    removed = [
        (page, path)
        for page in pages
        for path in re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]+\.py)`", (tidy.ROOT / page).read_text())
        if not (tidy.ROOT / path).exists()
    ]
    assert pages
    assert removed == []
