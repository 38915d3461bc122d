"""Tests of docs/data.md against the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.config import model
from dora_pipe.core.errors import TaskError
from dora_pipe.producers.data.prepare import open_rows
from dora_pipe.producers.data.spec import DataSpec
from dora_pipe.producers.tasks.dataset import DatasetTask
from dora_pipe.producers.tasks.registry import open_task
from tests.support.data_files import TEXT, write_jsonl
from tests.support.tidy import ROOT

PAGE = (ROOT / "docs" / "data.md").read_text()


def block(language: str, text: str) -> str:
    """Return the only block of a language that contains a text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    (found,) = [block for block in blocks if text in block]
    return str(found)


def test_configuration_of_the_page_opens_the_data_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    sources = ("synthetic", "web")
    rows = [
        {"question": f"q{n}", "solution": str(n), "level": n % 5, "source": sources[n % 2]}
        for n in range(2000)
    ]
    TEXT["rows.parquet"](Path("data/train-0.parquet"), rows)
    task = open_task(
        msgspec.convert(tomllib.loads(block("toml", "eval_share"))["task"], model.Task)
    )
    assert isinstance(task, DatasetTask)
    train, held = task.rows("train"), task.rows("eval")
    assert len(train) + len(held) == 400
    assert 0 < len(held) < 30
    assert {row["source"] for row in train} == {"web"}
    assert str(task.prompt(train[0])).startswith("q")


def test_task_of_the_page_reads_its_rows(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(block("python", "open_rows"), names)
    write_jsonl(tmp_path / "a.jsonl", [{"n": n, "split": ("train", "eval")[n]} for n in range(2)])
    task = names["Mine"](str(tmp_path / "a.jsonl"))
    assert [list(task.rows(split)) for split in ("train", "eval")] == [
        [{"n": 0, "split": "train"}],
        [{"n": 1, "split": "eval"}],
    ]


def test_error_of_the_page_is_what_is_said(tmp_path: Path) -> None:
    rows = [{"question": "a", "answer": "b", "prompt": "p"}] * 17 + [
        {"question": "a", "answer": "b"}
    ]
    path = tmp_path / "train.json"
    path.write_bytes(msgspec.json.encode(rows))
    with pytest.raises(TaskError) as caught:
        open_rows(DataSpec(sources=(str(path),), prompt="prompt"))
    said = f"error: {caught.value.message}\nhint: {caught.value.hint}\n"
    assert said.replace(str(path), "/data/train.json") in PAGE
