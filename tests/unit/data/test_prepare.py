"""Tests of preparation of large data in shared files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import DoraError, TaskError
from dora_pipe.producers.data import prepare
from dora_pipe.producers.data.prepare import open_rows
from dora_pipe.producers.data.rows import DataRows
from dora_pipe.producers.data.spec import DataSpec
from dora_pipe.producers.tasks.registry import rows_digest
from tests.support.data_files import write_jsonl


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(prepare.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(prepare, "MEMORY_BYTES_MAX", 10)
    return tmp_path / "cache" / "data"


def of(path: Path, **asked: Any) -> DataRows:
    return open_rows(DataSpec(sources=(str(path),), **asked))


def test_large_data_are_prepared_once_and_have_the_same_digest(tmp_path: Path, cache: Path) -> None:
    rows = [{"prompt": f"p{n}", "answer": str(n)} for n in range(50)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    texts: list[str] = []
    with prepare.reporting(texts.append):
        first = of(tmp_path / "a.jsonl", filter="int(answer) > 9")
        again = of(tmp_path / "a.jsonl", filter="int(answer) > 9")
    assert (first.digest, len(first)) == rows_digest(rows[10:], "train")
    assert list(first) == list(again) == rows[10:]
    assert len(list(cache.glob("*.rows"))) == 1
    assert "prepared once per machine" in texts[0]
    assert [line for line in texts if "40 rows prepared" in line] == texts[-1:]


def test_refusal_of_large_data_is_the_same_error(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": \n')
    with pytest.raises(TaskError, match=r"a\.jsonl, line 2: Input data was truncated"):
        of(tmp_path / "a.jsonl")
    assert not list(cache.glob("*.rows"))
    assert not list(cache.glob("*.unfinished"))


def test_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    write_jsonl(tmp_path / "a.jsonl", [{"n": 1}])
    before = cache / "as-it-was-before.rows"
    with pytest.raises(TaskError, match="changed during reading"):
        prepare.prepare(DataSpec(sources=(str(tmp_path / "a.jsonl"),)), before)
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_cache_that_cannot_be_written_is_said(tmp_path: Path, cache: Path) -> None:
    cache.parent.write_text("a file in its place")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "more than ten bytes"}])
    with pytest.raises(DoraError, match="cache") as caught:
        of(tmp_path / "a.jsonl")
    assert caught.value.hint == "DORA_PIPE_CACHE names another folder"


def test_longest_unused_files_make_room_and_who_reads_them_goes_on(
    tmp_path: Path, cache: Path
) -> None:
    kept = []
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"name": name * 20}])
        kept.append(of(tmp_path / f"{name}.jsonl"))
    newest = max(cache.glob("*.rows"), key=lambda path: path.stat().st_mtime_ns)
    prepare.make_room(newest, bytes_max=newest.stat().st_size)
    assert list(cache.glob("*.rows")) == [newest]
    assert [rows[0]["name"][0] for rows in kept] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "rubbish", [b"", b"12345678", json.dumps({"rows": 3}).encode() + b"\0" * 8, b"\xff" * 64]
)
def test_file_that_is_no_file_of_rows_is_refused(rubbish: bytes) -> None:
    with pytest.raises(TaskError, match="no file of rows"):
        DataRows(rubbish)
