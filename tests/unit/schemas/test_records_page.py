"""docs/records.md is what the code says, and leaves nothing out."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.schemas import control, metrics
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import kebab
from tests.golden import make
from tests.support import records_page, records_words

PAGE = Path(__file__).resolve().parents[3] / "docs" / "records.md"


def test_page_is_the_one_that_the_code_prints() -> None:
    assert PAGE.read_text() == records_page.page(), (
        "run python -m tests.support.records_page > docs/records.md"
    )


def test_every_topic_and_kind_is_on_the_page() -> None:
    page = PAGE.read_text()
    for kind in control.KINDS | metrics.KINDS:
        assert f"\n### {kind}\n" in page
    for topic in Topics("run").all():
        assert f"\n## {topic.removeprefix('run.')}\n" in page
        assert f"`<run>.{topic.removeprefix('run.')}`" in page


@pytest.mark.parametrize("line", make.field_lines())
def test_every_json_field_is_on_the_page_under_its_record(line: str) -> None:
    record, field = line.split(":")[0].split(".")
    headings = {
        "Meta": "### The object in `meta_json`",
        **{name: f"### {name}" for name in ("Round", *(one for one, _ in records_words.PARTS))},
    }
    heading = headings.get(record, f"### {kebab(record)}")
    section = PAGE.read_text().split(f"{heading}\n", 1)[1].split("\n#", 1)[0]
    assert f"| `{field}` |" in section


def test_no_common_meaning_is_left_over() -> None:
    used: set[str] = set()
    for module in records_page.MODULES:
        source = Path(str(module.__file__)).read_text()
        for name in records_words.COMMON:
            record, _, field = name.rpartition(".")
            if f"\n    {field}:" in source and (not record or f"class {record}(" in source):
                used.add(name)
            if record and f"class {record}:" in source:
                used.add(name)
    assert set(records_words.COMMON) - used == set()
