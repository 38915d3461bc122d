"""Tests that the promises page names existing tests."""

from __future__ import annotations

import re

from tests.support.tidy import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Guarantees\n")[2]


def test_every_row_names_a_test_and_every_named_test_is_there() -> None:
    rows = [line for line in PAGE.partition("\n### ")[0].splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 10
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for row in rows:
        *_, proof, _ = row.split("|")
        named = re.findall(r"test_\w+\.py", proof)
        assert named or "contract suite" in proof, row
        assert set(named) <= there, sorted(set(named) - there)
