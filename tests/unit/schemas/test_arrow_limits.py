"""No Arrow record takes more memory than the bounds say, whatever its bytes say."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from typing import NamedTuple

import pyarrow as pa
import pytest

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import arrow_frame
from dora_pipe.schemas.arrow_frame import COLUMN_BYTES_MAX, DECODE_BYTES_MAX, FRAME_BYTES_MAX
from dora_pipe.schemas.arrow_message import METADATA_BYTES_MAX, check_schema, metadata_bytes
from dora_pipe.schemas.trajectory_codec import TRAJECTORY, decode_trajectory
from tests.golden import arrow_values
from tests.support.arrow_bombs import (
    BOMBS,
    LIST,
    RAW,
    UTF8,
    frame,
    schema_message,
    structs,
    with_columns,
)

SPARE_BYTES = 16 * 1024 * 1024
"""What the interpreter and zstd take beside it."""


class Taken(NamedTuple):
    """What reading a bomb took."""

    refused: str
    grown_bytes: int
    pool_bytes: int
    size: int


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Taken]:
    """What reading each bomb took, in a process of its own."""
    folder = tmp_path_factory.mktemp("bombs")
    files = []
    for name, (made, _) in BOMBS.items():
        path = folder / name
        path.write_bytes(made())
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
    sizes = [one.size for name, one in taken.items() if BOMBS[name][1]]
    assert len(sizes) > 20
    assert sum(sizes) < 8 * 1024 * 1024


def test_schema_as_anybody_writes_it_is_read() -> None:
    for schema in (TRAJECTORY.schema, pa.schema([("x", pa.list_(pa.struct([("y", pa.int64())])))])):
        message = schema.serialize().to_pybytes()
        size = metadata_bytes(message[:8])
        assert 0 < size < METADATA_BYTES_MAX
        check_schema(message[8 : 8 + size])
    for hand_made in (schema_message([3, 2]), schema_message([2], tag=UTF8, texts=2, text=b"a")):
        assert pa.ipc.read_schema(pa.py_buffer(hand_made)) is not None
        check_schema(hand_made[8:])


def test_stream_without_continuation_is_read_as_arrow_once_wrote_it() -> None:
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    sink = pa.BufferOutputStream()
    batch = pa.ipc.open_stream(RAW).read_next_batch()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    assert decode_trajectory(frame(sink.getvalue().to_pybytes())) == arrow_values.TRAJECTORY


def test_more_columns_and_more_fields_of_segments_are_left_alone() -> None:
    batch = pa.ipc.open_stream(RAW).read_next_batch()
    segments = batch.column("segments")[0].values
    more = {name: segments.field(name) for name in segments.type.names}
    more["later"] = pa.array([b"x"] * len(segments))
    wider = pa.ListArray.from_arrays(
        pa.array([0, len(segments)], pa.int32()), structs(len(segments), **more)
    )
    raw = with_columns(segments=wider, later=pa.array([[[1]]]))
    assert decode_trajectory(frame(raw)) == arrow_values.TRAJECTORY


@pytest.mark.parametrize(
    "kind", [pa.map_(pa.string(), pa.int8()), pa.large_list(pa.int8()), pa.list_(pa.int8(), 0)]
)
def test_fields_of_segments_of_which_python_could_make_anything_are_refused(
    kind: pa.DataType,
) -> None:
    batch = pa.ipc.open_stream(RAW).read_next_batch()
    segments = batch.column("segments")[0].values
    more = {name: segments.field(name) for name in segments.type.names}
    more["later"] = pa.nulls(len(segments), kind)
    wider = pa.ListArray.from_arrays(
        pa.array([0, len(segments)], pa.int32()), structs(len(segments), **more)
    )
    with pytest.raises(SchemaError, match="is not read here"):
        decode_trajectory(frame(with_columns(segments=wider)))


def test_what_could_not_be_read_is_not_written() -> None:
    rows = [{"kind": "model"}] * (arrow_frame.ROWS_MAX + 1)
    with pytest.raises(SchemaError, match="structs in a list are above"):
        TRAJECTORY.seal(_sealed(segments=rows))
    with pytest.raises(SchemaError, match="entries are above"):
        TRAJECTORY.seal(_sealed(loss_mask=bytes(arrow_frame.ENTRIES_MAX + 1)))


def test_schema_whose_table_points_nowhere_is_refused() -> None:
    message = bytearray(schema_message([1], tag=LIST)[8:])
    (root,) = struct.unpack_from("<I", message)
    struct.pack_into("<i", message, root, 2**31 - 1)
    with pytest.raises(SchemaError, match="not an Arrow message"):
        check_schema(bytes(message))
    with pytest.raises(SchemaError, match="not an Arrow message"):
        check_schema(b"\x10\0\0")


def _sealed(**columns: object) -> list[pa.Array]:
    batch = pa.ipc.open_stream(RAW).read_next_batch()
    made = dict(zip(batch.schema.names, batch.columns, strict=True))
    for name, value in columns.items():
        made[name] = pa.array(
            [list(value) if isinstance(value, bytes) else value], batch.schema.field(name).type
        )
    return list(made.values())
