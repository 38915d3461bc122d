"""Parser of reference/traces.md: stages and attributes of spans."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from tests.support.tidy import ROOT

PAGE = ROOT / "docs" / "reference" / "traces.md"


@dataclass(frozen=True)
class Stage:
    parent: str
    """Stage of the parent; empty for a root."""
    kind: str
    attributes: tuple[str, ...]


@cache
def stages() -> dict[str, Stage]:
    text = PAGE.read_text().partition("## Spans")[2].partition("## Attributes")[0]
    rows = re.findall(r"^- \*\*(\w+)\*\* \((.+?), (\w+)\): .+?\. (.*)$", text, re.M)
    return {
        name: Stage(
            parent=under.strip("`") if "`" in under else "",
            kind=kind,
            attributes=tuple(re.findall(r"`([^`]+)`", own.partition(";")[0])),
        )
        for name, under, kind, own in rows
    }


@cache
def attributes() -> list[str]:
    text = PAGE.read_text().partition("## Attributes")[2]
    return re.findall(r"^- `([^`]+)` ", text, re.M)
