"""Tests that rows have one digest in every format."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.core.errors import DoraError, TaskError
from dora_pipe.producers.data.prepare import open_rows
from dora_pipe.producers.data.rows import DataRows
from dora_pipe.producers.data.spec import DataSpec
from dora_pipe.producers.tasks.registry import rows_digest
from tests.support.data_files import TEXT, TYPED, write_jsonl

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


def of(*sources: Path | str, **asked: Any) -> DataRows:
    return open_rows(DataSpec(sources=tuple(map(str, sources)), **asked))


@settings(max_examples=25)
@given(st.lists(st.fixed_dictionaries({"prompt": TEXTS, "answer": TEXTS}), min_size=1))
def test_rows_of_text_are_the_same_in_every_format(rows: list[dict[str, str]]) -> None:
    digest = rows_digest(rows, "train")
    with TemporaryDirectory() as folder:
        for name, write in TEXT.items():
            write(Path(folder) / name, rows)
            result = of(Path(folder) / name)
            assert (list(result), result.digest, len(result)) == (rows, *digest), name


@settings(max_examples=25)
@given(st.data())
def test_rows_of_values_are_the_same_in_every_format_that_has_types(data: st.DataObject) -> None:
    inner = st.fixed_dictionaries({"role": TEXTS, "content": TEXTS})
    row = st.fixed_dictionaries(
        {
            "n": st.integers(-(2**63), 2**63 - 1),
            "x": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
            "flag": st.booleans() | st.none(),
            "messages": st.lists(inner, max_size=3),
        }
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=20))
    rows[0]["messages"] = [{"role": "user", "content": "?"}]  # tables need a type
    digest = rows_digest(rows, "train")
    with TemporaryDirectory() as folder:
        for name, write in TYPED.items():
            write(Path(folder) / name, rows)
            result = of(Path(folder) / name)
            assert (list(result), result.digest, len(result)) == (rows, *digest), name


def test_files_of_a_glob_are_sorted_and_several_sources_keep_their_order(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"from": name}])
    assert [row["from"] for row in of(tmp_path / "*.jsonl")] == ["a", "b", "c"]
    both = of(tmp_path / "c.jsonl", tmp_path / "[ab].jsonl")
    assert [row["from"] for row in both] == ["c", "a", "b"]


def test_what_json_lacks_becomes_text_or_number(tmp_path: Path) -> None:
    entry = datetime.datetime(2026, 5, 4, 3, 2, 1, 500, tzinfo=datetime.UTC)
    columns = {
        "at": pa.array([entry], pa.timestamp("ns", "UTC")),
        "day": pa.array([entry.date()]),
        "price": pa.array([decimal.Decimal("1.25")]),
        "took": pa.array([datetime.timedelta(seconds=1.5)]),
        "score": pa.array([float("nan")]),
        "nested": pa.array([[{"at": entry.replace(tzinfo=None)}]]),
        "kind": pa.array(["a"]).dictionary_encode(),
        "map": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert of(tmp_path / "a.parquet")[0] == {
        "at": "2026-05-04T03:02:01.000500+00:00",
        "day": "2026-05-04",
        "price": 1.25,
        "took": 1.5,
        "score": None,
        "nested": [{"at": "2026-05-04T03:02:01.000500"}],
        "kind": "a",
        "map": {"k": 1},
    }


def test_nan_is_null_and_an_infinity_is_refused_in_every_format(tmp_path: Path) -> None:
    for number, expected in ((math.nan, [None]), (math.inf, "inf|Infinity is not a JSON number")):
        pq.write_table(pa.table({"x": [number]}), tmp_path / "a.parquet")
        (tmp_path / "a.jsonl").write_text(json.dumps({"x": number}))
        (tmp_path / "a.json").write_text(json.dumps([{"x": number}]))
        for name in ("a.parquet", "a.jsonl", "a.json"):
            if isinstance(expected, list):
                assert [row["x"] for row in of(tmp_path / name)] == expected
            else:
                with pytest.raises(TaskError, match=expected):
                    of(tmp_path / name)


@pytest.mark.parametrize(
    "column",
    [pa.array([b"\xff"]).view(pa.string()), pa.array([2**60], pa.timestamp("us"))],
    ids=["no UTF-8", "no year"],
)
def test_value_that_python_has_not_is_an_error_that_names_the_file(
    tmp_path: Path, column: pa.Array
) -> None:
    pq.write_table(pa.table({"q": column}), tmp_path / "a.parquet")
    with pytest.raises(TaskError, match=r"a\.parquet: "):
        of(tmp_path / "a.parquet")


def test_bytes_are_refused_by_their_column_and_can_be_left_out(tmp_path: Path) -> None:
    table = pa.table({"q": ["a"], "image": [{"bytes": b"\x89PNG", "path": "x.png"}]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(
        TaskError, match=r"a\.parquet: column `image\.bytes` contains bytes"
    ) as caught:
        of(tmp_path / "a.parquet")
    assert caught.value.hint == 'task.columns = {"image" = ""} drops it'
    assert of(tmp_path / "a.parquet", columns={"image": ""})[0] == {"q": "a"}


def test_json_lines_in_a_json_file_and_a_mark_of_byte_order_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n')
    (tmp_path / "b.json").write_bytes(b'\xef\xbb\xbf [{"n": 1}, {"n": 2}]')
    (tmp_path / "c.csv").write_bytes(b"\xef\xbb\xbfn\r\n007\r\n")
    assert list(of(tmp_path / "a.json")) == list(of(tmp_path / "b.json")) == [{"n": 1}, {"n": 2}]
    assert list(of(tmp_path / "c.csv")) == [{"n": "007"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b\n1,2\n3\n", "line 3: 1 cells for 2 columns"),
        ("a.csv", b"a,a\n1,2\n", "line 1: two columns have the same name"),
        ("a.csv", b'a\n"1\n', "behind line 1: unexpected end of data"),
        ("a.csv", b"a\n\xff\n", "behind line 1: 'utf-8' codec"),
        ("a.json", b'[{"a": 1}, 2]', "row 1: Expected `object`, got `int`"),
        ("a.json", b'[{"a": 1}', "a.json: Input data was truncated"),
        ("a.jsonl.gz", b"\x1f\x8b\x08\x00rubbish", "a.jsonl.gz: "),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfdrubbish", "a.jsonl.zst: "),
        ("a.parquet", b"PAR1rubbishPAR1", "a.parquet: "),
        ("a.jsonl", b'{"a": "\xff"}', "line 1: "),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError) as caught:
        of(tmp_path / name)
    assert message in caught.value.message
    assert str(tmp_path / name) in caught.value.message


@settings(max_examples=150)
@given(
    st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.tsv.gz", "a.parquet"]),
    st.sampled_from(
        [b"", b"PAR1", b"ARROW1\0\0", b"\xff" * 4, b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"["]
    ),
    st.binary(max_size=60),
)
def test_any_bytes_are_rows_or_an_error_that_names_the_file(
    name: str, head: bytes, rest: bytes
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(head + rest)
        try:
            assert len(of(path)) >= 0
        except TaskError as error:
            assert str(path) in error.message


@settings(max_examples=60)
@given(st.sampled_from(sorted(TEXT)), st.data())
def test_damaged_files_are_rows_or_an_error_that_names_the_file(
    name: str, data: st.DataObject
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        TEXT[name](path, [{"prompt": "a" * 30, "answer": "b"}] * 20)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            assert len(of(path)) >= 0
        except TaskError as error:
            assert str(path) in error.message


@pytest.mark.parametrize(
    ("source", "asked", "message"),
    [
        ("rows.jsonl", {"split": "train"}, "a file has no split `train`"),
        ("rows.jsnol", {}, "No such file or directory; did you mean `rows.jsonl`?"),
        ("*.parquet", {}, "no file matches"),
        (".", {}, "is a directory; name the files"),
        ("hf:", {}, "`hf:` is not a data set"),
        ("rows.jsonl", {"columns": {"prompt": "qestion"}}, "no column `qestion`; did you mean"),
        ("rows.jsonl", {"prompt": "prompt"}, "line 1: no text in `prompt`; it has `question`"),
        ("rows.jsonl", {"prompt": "level"}, "line 1: no text in `level`"),
        ("rows.jsonl", {"filter": "levle > 1"}, "line 1: task.filter: no column `levle`; did you"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(
    tmp_path: Path, source: str, asked: dict[str, Any], message: str
) -> None:
    rows = [{"question": "a", "level": 1}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DoraError) as caught:
        of(source if source.startswith("hf:") else tmp_path / source, **asked)
    assert message in f"{caught.value.message}; {caught.value.hint}"


def test_columns_are_renamed_before_rows_are_chosen(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": "long", "short": str(n)} for n in range(4)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    result = of(
        tmp_path / "a.jsonl",
        columns={"prompt": "question", "answer": "short"},
        filter='answer in ("1", "2")',
    )
    assert list(result) == [{"prompt": "q1", "answer": "1"}, {"prompt": "q2", "answer": "2"}]
    twice = of(tmp_path / "a.jsonl", columns={"prompt": "question", "text": "question"})
    assert twice[0] == {"prompt": "q0", "text": "q0", "answer": "long", "short": "0"}


@settings(max_examples=20)
@given(st.lists(st.integers(0), unique=True, max_size=60), st.floats(0.05, 0.95))
def test_held_out_rows_and_the_rest_are_all_rows(numbers: list[int], share: float) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        write_jsonl(path, [{"n": n} for n in numbers])
        train, held = (of(path, part=part, held_out=share) for part in ("train", "eval"))
        chosen = {row["n"] for row in held}
        assert [n for n in numbers if n in chosen] == [row["n"] for row in held]
        assert [n for n in numbers if n not in chosen] == [row["n"] for row in train]
        write_jsonl(path, [{"n": n} for n in [*reversed(numbers), -1]])
        again = {row["n"] for row in of(path, part="eval", held_out=share)}
        assert again - {-1} == chosen, "a row's side depends on the row alone"
