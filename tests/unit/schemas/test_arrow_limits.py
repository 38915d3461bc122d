"""Tests that Arrow records respect memory limits."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import NamedTuple

import pyarrow as pa
import pytest

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import arrow_frame
from dora_pipe.schemas.arrow_frame import (
    COLUMN_BYTES_MAX,
    DECODE_BYTES_MAX,
    FRAME_BYTES_MAX,
    METADATA_BYTES_MAX,
)
from dora_pipe.schemas.trajectory_codec import PROGRESS, TRAJECTORY, TURN_PROGRESS
from tests.support.arrow_bombs import BOMBS, RAW

SPARE_BYTES = 16 * 1024 * 1024
"""Bytes for the interpreter and zstd."""


class Taken(NamedTuple):
    refused: str
    grown_bytes: int
    pool_bytes: int
    size: int


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Taken]:
    folder = tmp_path_factory.mktemp("bombs")
    files = []
    for name, (columns, _) in BOMBS.items():
        path = folder / name
        path.write_bytes(columns())
        files.append(str(path))
    command = [sys.executable, "-m", "tests.support.arrow_bombs", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    return {
        name: Taken(refused, int(grown), int(pool), (folder / name).stat().st_size)
        for name, refused, grown, pool in lines
    }


@pytest.mark.parametrize("name", BOMBS)
def test_record_is_read_or_refused_within_its_bounds(name: str, taken: dict[str, Taken]) -> None:
    expected = BOMBS[name][1]
    refused, grown, pool, _ = taken[name]
    assert re.search(expected, refused) if expected else not refused, refused
    assert grown <= (FRAME_BYTES_MAX + SPARE_BYTES if expected else DECODE_BYTES_MAX)
    assert pool <= COLUMN_BYTES_MAX


def test_bombs_are_small_until_they_are_read(taken: dict[str, Taken]) -> None:
    sizes = [decision.size for name, decision in taken.items() if BOMBS[name][1]]
    assert len(sizes) >= 18
    assert sum(sizes) < 8 * 1024 * 1024


def test_metadata_of_every_record_are_below_their_bound() -> None:
    for entry in (TRAJECTORY, PROGRESS, TURN_PROGRESS):
        for layout in (entry, entry.routed):
            row = pa.RecordBatch.from_arrays(
                [pa.nulls(1, field.type) for field in layout.schema], schema=layout.schema
            )
            assert len(layout.head) < METADATA_BYTES_MAX
            assert len(row.serialize()) < METADATA_BYTES_MAX + row.nbytes


def test_what_could_not_be_read_is_not_written() -> None:
    rows = [{"kind": "model"}] * (arrow_frame.ROWS_MAX + 1)
    with pytest.raises(SchemaError, match="entries are above"):
        TRAJECTORY.seal(_sealed(segments=rows))
    with pytest.raises(SchemaError, match="entries are above"):
        TRAJECTORY.seal(_sealed(loss_mask=bytes(arrow_frame.ENTRIES_MAX + 1)))


def _sealed(**columns: object) -> list[pa.Array]:
    batch = pa.ipc.open_stream(RAW).read_next_batch()
    created = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, value in columns.items():
        created[name] = pa.array(
            [list(value) if isinstance(value, bytes) else value], batch.schema.field(name).type
        )
    return list(created.values())
