"""Writers of equal rows in every supported format."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

Rows = Sequence[Mapping[str, Any]]


def write_jsonl(path: Path, rows: Rows) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _array(path: Path, rows: Rows) -> None:
    path.write_text(json.dumps(list(rows), indent=1))


def _csv(path: Path, rows: Rows, delimiter: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


def _parquet(path: Path, rows: Rows) -> None:
    pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=7)


def _gzip(path: Path, rows: Rows) -> None:
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def _zstd(path: Path, rows: Rows) -> None:
    path.write_bytes(zstandard.compress(json.dumps(list(rows)).encode()))


TYPED: Final[Mapping[str, Callable[[Path, Rows], None]]] = {
    "rows.jsonl": write_jsonl,
    "rows.json": _array,
    "rows.jsonl.gz": _gzip,
    "rows.json.zst": _zstd,
    "rows.parquet": _parquet,
}
"""Writer by file name."""

TEXT: Final[Mapping[str, Callable[[Path, Rows], None]]] = {
    **TYPED,
    "rows.csv": _csv,
    "rows.tsv": lambda path, rows: _csv(path, rows, "\t"),
}
"""Writers that support text rows."""
