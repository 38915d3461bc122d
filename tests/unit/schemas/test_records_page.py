"""Tests of docs/reference/records.md: order of fields and form of JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dora_pipe.schemas.wire import canonical
from tests.golden import make

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "records.md"
GOLDEN = sorted(path for path in make.FOLDER.glob("*/*.json") if path.stem[:5] != "round")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_fields_of_a_record_stand_in_the_order_of_the_page(path: Path) -> None:
    record = json.loads(path.read_bytes())
    section = PAGE.read_text().split(f"### {record['kind']}\n", 1)[1].split("\n#", 1)[0]
    lists = [line.partition("): ")[0] for line in section.splitlines() if line.startswith("- `")]
    order = re.findall(r"`(\w+)\??`", " ".join(lists))
    assert ["kind", *(name for name in order if name in record)] == [*record]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.00001, "0.00001"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (1e-6, "1e-6"),
        (9e15, "9000000000000000.0"),
        (1.5e16, "1.5e16"),
        (2**63 - 1, "9223372036854775807"),
        (None, "null"),
        ('a/é\x1f\x7f"\\', '"a/é\\u001f\x7f\\"\\\\"'),
        ("\b\f\n\r\t", '"\\b\\f\\n\\r\\t"'),
        ({"b": {"é": 1, "z": 2}, "a": [True]}, '{"a":[true],"b":{"z":2,"é":1}}'),
    ],
)
def test_values_are_written_as_the_page_says(value: object, text: str) -> None:
    assert canonical(value).decode() == text
