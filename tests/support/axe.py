"""Asks axe-core what is wrong with a page; `make axe` fetches it, and it is never kept here."""

from __future__ import annotations

from tests.support.chromium import Page
from tests.support.tidy import ROOT

AXE = ROOT / ".axe" / "package" / "axe.min.js"


def violations(page: Page) -> list[str]:
    """What axe finds on the page as it is now: rule, and the first element that breaks it."""
    page.run(f"{AXE.read_text()}; true")
    found = page.run(
        "axe.run(document, {resultTypes: ['violations']}).then((told) => told.violations.map("
        "(one) => `${one.id}: ${one.help}: ${one.nodes[0].html.slice(0, 160)} "
        "(${one.nodes.length})`))"
    )
    return [str(one) for one in found]
