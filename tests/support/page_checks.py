"""Accessibility checks in a browser: own expressions, and axe-core (fetched by `make axe`)."""

from __future__ import annotations

from typing import Any, Final

from tests.support.chromium import Page
from tests.support.tidy import ROOT

AXE: Final = ROOT / ".axe" / "package" / "axe.min.js"

LABELS: Final = """
[...document.querySelectorAll('input, select, button, a, svg[role=img], [role=region], nav')]
  .filter((one) => !(one.getAttribute('aria-label') || one.innerText?.trim() ||
    (one.labels && one.labels.length)))
  .map((one) => one.outerHTML.slice(0, 120))
"""
"""Controls, links, charts and regions without a name."""

CONTRAST: Final = r"""
(() => {
  const part = (v) => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => .2126 * part(r) + .7152 * part(g) + .0722 * part(b);
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const found = rgb(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const low = new Set();
  for (const one of document.querySelectorAll('body *')) {
    if (one.closest('svg, .unseen, noscript, script, style')) continue;
    if (![...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
    const ink = light(rgb(getComputedStyle(one).color));
    const [a, b] = [ink, light(ground(one))].sort((x, y) => y - x);
    if ((a + .05) / (b + .05) < 4.5) low.add(`${one.className || one.tagName}: ${one.innerText}`);
  }
  return [...low];
})()
"""
"""Texts with a contrast below 4.5 to 1 (WCAG 2, AA)."""

TABLES_EMPTY: Final = """
[...document.querySelectorAll('figure details')]
  .filter((one) => !one.querySelector('tbody tr')).map((one) => one.innerText)
"""
"""Charts with an empty table."""

UNFOLD: Final = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"

DRAWN_WIDE: Final = """
[...document.querySelectorAll('svg')].filter((one) => one.clientWidth > innerWidth)
  .map((one) => one.getAttribute('aria-label'))
"""
"""Charts wider than the window."""


def unusable(page: Page, width: int) -> dict[str, Any]:
    page.run(UNFOLD)
    page.settle()
    across = page.run("document.documentElement.scrollWidth")
    results: dict[str, Any] = {
        "wider than the window": across if across > width else None,
        "charts wider than the window": page.run(DRAWN_WIDE),
        "empty tables": page.run(TABLES_EMPTY),
        "without a name": page.run(LABELS),
        "without contrast": page.run(CONTRAST),
        "axe": violations(page) if AXE.is_file() else [],
    }
    return {what: which for what, which in results.items() if which}


def violations(page: Page) -> list[str]:
    if page.run("typeof axe === 'undefined'"):
        page.run(f"{AXE.read_text()}; true")
    result = page.run(
        "axe.run(document, {resultTypes: ['violations']}).then((told) => told.violations.map("
        "(one) => `${one.id}: ${one.help}: ${one.nodes[0].html.slice(0, 160)} "
        "(${one.nodes.length})`))"
    )
    return [str(entry) for entry in result]
