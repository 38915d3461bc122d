"""Tests of docs/reference/records.md: complete, with valid examples."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.schemas import control, metrics, rounds
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Meta
from dora_pipe.schemas.wire import canonical, kebab
from tests.golden import make

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "records.md"
GOLDEN = sorted(path for path in make.FOLDER.glob("*/*.json") if path.stem[:5] != "round")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_fields_of_a_record_stand_in_the_order_of_the_page(path: Path) -> None:
    record = json.loads(path.read_bytes())
    section = PAGE.read_text().split(f"### {record['kind']}\n", 1)[1].split("\n#", 1)[0]
    order = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
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


def test_every_topic_and_kind_is_on_the_page() -> None:
    page = PAGE.read_text()
    for kind in control.KINDS | metrics.KINDS:
        assert f"\n### {kind}\n" in page
    for topic in Topics("run").all():
        assert f"\n## {topic.removeprefix('run.')}\n" in page
        assert f"`<run>.{topic.removeprefix('run.')}`" in page


def test_every_json_field_is_on_the_page_under_its_record() -> None:
    page = PAGE.read_text()
    kinds: dict[str, type[msgspec.Struct]] = {}
    for union in (control.AnyControl, metrics.AnyMetrics, rounds.Round, Meta):
        _collect(union, kinds)
    fields = [(name, field) for name, kind in kinds.items() for field in kind.__struct_fields__]
    missing = []
    for record, field in fields:
        heading = next(one for one in _headings(record) if f"\n{one}\n" in page)
        section = page.split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
        if f"| `{field}` |" not in section:
            missing.append(f"{record}.{field}")
    assert len(fields) > 300
    assert missing == []


def _headings(record: str) -> list[str]:
    if record == "Meta":
        return ["### The object in `meta_json`"]
    return [f"{level} {name}" for level in ("####", "###") for name in (kebab(record), record)]


def _collect(kind: Any, kinds: dict[str, type[msgspec.Struct]]) -> None:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        kinds[kind.__name__] = kind
        for field in msgspec.structs.fields(kind):
            _collect(field.type, kinds)
    for part in typing.get_args(kind):
        _collect(part, kinds)
