"""Tests that any bytes give a record or a SchemaError, in bounded memory."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas import arrow_frame
from dora_pipe.schemas.control import StepCommitted, decode_control
from dora_pipe.schemas.dead_letter import HEADER, decode_dead_letter
from dora_pipe.schemas.headers import header_pairs, parse_headers
from dora_pipe.schemas.metrics import decode_metrics
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.trajectory_codec import (
    TRAJECTORY,
    decode_any_progress,
    decode_trajectory,
    encode_any_progress,
    encode_trajectory,
)
from dora_pipe.schemas.wire import RECORD_BYTES_MAX, Unknown, encode
from tests.golden import arrow_values, make, values
from tests.golden.branched_values import PROGRESS, TURN_PROGRESS

Decode = Callable[[bytes], Any]

JSON: list[tuple[Decode, bytes]] = [
    *((decode_control, encode(one)) for one in values.CONTROL),
    *((decode_metrics, encode(one)) for one in values.METRICS),
    (decode_round, encode(values.ROUND)),
]
ARROW: list[tuple[Decode, bytes]] = [
    (decode_trajectory, encode_trajectory(arrow_values.TRAJECTORY)[0]),
    (decode_trajectory, encode_trajectory(arrow_values.PLAIN_TRAJECTORY)[0]),
    (decode_any_progress, encode_any_progress(PROGRESS)),
    (decode_any_progress, encode_any_progress(TURN_PROGRESS)),
]
DECODERS = (
    decode_control,
    decode_metrics,
    decode_round,
    decode_trajectory,
    decode_any_progress,
)


@st.composite
def mutations(draw: st.DrawFn, of: bytes) -> bytes:
    data = bytearray(of)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.integers(0, 4))
        if how == 0 and data:
            data[position] ^= 1 << draw(st.integers(0, 7))
        elif how == 1:
            data[position : position + 1] = draw(st.binary(max_size=4))
        elif how == 2:
            del data[position : position + draw(st.integers(1, 16))]
        elif how == 3:
            data[position : position + 8] = struct.pack(
                "<q", draw(st.integers(-(2**63), 2**63 - 1))
            )
        else:
            del data[position:]
    return bytes(data)


def expect_read_or_refused(decode: Decode, data: bytes) -> bool:
    try:
        decode(data)
    except SchemaError as error:
        assert "\n" not in str(error)
        assert error.path.startswith("$")
        return False
    return True


@given(st.binary(max_size=200))
@example(b"")
@example(b"[" * 100_000)
@example(b'{"kind":"\\ud800"}')
@example(b'{"kind":17}')
@example(b'{"kind":"","":0}')
def test_random_bytes_are_refused_by_every_reader_or_of_an_unknown_kind(data: bytes) -> None:
    for decode in DECODERS:
        try:
            decoded = decode(data)
        except SchemaError:
            continue
        assert isinstance(decoded, Unknown)
        assert decoded.raw == data


@pytest.mark.parametrize("digits", ["1" * 5000, "1e999", "-1e999", "NaN", "Infinity", "1.5"])
def test_number_that_is_none_is_refused(digits: str) -> None:
    commit = next(event for event in values.CONTROL if isinstance(event, StepCommitted))
    changed = encode(commit).replace(b'"step":4', b'"step":' + digits.encode())
    with pytest.raises(SchemaError):
        decode_control(changed)


@settings(max_examples=400)
@given(st.data(), st.sampled_from(JSON))
def test_mutated_json_is_read_or_refused(data: st.DataObject, record: tuple[Decode, bytes]) -> None:
    expect_read_or_refused(record[0], data.draw(mutations(record[1])))


@settings(max_examples=300)
@given(st.data(), st.sampled_from(ARROW))
def test_mutated_frame_is_refused_or_says_the_same(
    data: st.DataObject, record: tuple[Decode, bytes]
) -> None:
    decode, sound = record
    mutated = data.draw(mutations(sound))
    if expect_read_or_refused(decode, mutated):
        assert decode(mutated) == decode(sound)


@settings(max_examples=600)
@given(st.data(), st.sampled_from(ARROW))
def test_mutated_stream_in_a_sound_frame_is_read_or_refused(
    data: st.DataObject, record: tuple[Decode, bytes]
) -> None:
    raw = arrow_frame.decompress(record[1])
    expect_read_or_refused(record[0], zstandard.compress(data.draw(mutations(raw))))


@given(st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=70)), max_size=3), st.data())
def test_mutated_headers_are_read_or_refused(
    more: list[tuple[str, bytes]], data: st.DataObject
) -> None:
    pairs = [*header_pairs(arrow_values.HEADERS), *more]
    index = data.draw(st.integers(0, len(pairs) - 1))
    pairs[index] = (pairs[index][0], data.draw(mutations(pairs[index][1])))
    expect_read_or_refused(lambda _: parse_headers(pairs), b"")


@given(st.data())
def test_mutated_dead_letter_is_read_or_refused(data: st.DataObject) -> None:
    files = make.files()
    header = dict(make.pairs_from_bytes(files["dead-letters/headers.txt"]))[HEADER]
    mutated = data.draw(mutations(header))
    expect_read_or_refused(
        lambda value: decode_dead_letter(value, [(HEADER, mutated)]), b"\xde\xad"
    )


def test_json_above_the_bound_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(SchemaError, match=f"above {RECORD_BYTES_MAX}"):
        decode_control(b'{"kind":"' + b"x" * RECORD_BYTES_MAX + b'"}')


def bomb(*, says_its_size: bool, raw_bytes: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=says_its_size)
    if says_its_size:
        return compressor.compress(bytes(raw_bytes))
    stream = compressor.compressobj()
    pieces = [stream.compress(bytes(1 << 20)) for _ in range(raw_bytes >> 20)]
    return b"".join([*pieces, stream.flush()])


@pytest.mark.parametrize("says_its_size", [True, False])
def test_frame_beyond_the_bound_is_refused(says_its_size: bool) -> None:
    frame = bomb(says_its_size=says_its_size, raw_bytes=arrow_frame.FRAME_BYTES_MAX + (1 << 20))
    assert len(frame) < 1 << 14
    with pytest.raises(SchemaError, match=f"above {arrow_frame.FRAME_BYTES_MAX}"):
        decode_trajectory(frame)


def test_frame_that_claims_a_size_beyond_the_bound_costs_nothing() -> None:
    header = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 50) + b"\x01\x00\x00"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SchemaError, match=f"frame of {1 << 50} bytes is above"):
        decode_trajectory(header)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024  # KiB


def test_frame_without_a_size_is_read() -> None:
    stream = zstandard.ZstdCompressor(level=3).compressobj()
    raw = arrow_frame.decompress(ARROW[0][1])
    frame = stream.compress(raw) + stream.flush()
    assert zstandard.frame_content_size(frame) == -1
    assert decode_trajectory(frame) == arrow_values.TRAJECTORY


def test_frame_with_something_behind_it_is_refused() -> None:
    with pytest.raises(SchemaError, match="not a zstd frame"):
        decode_trajectory(ARROW[0][1] + b"x")


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_arrow_body_is_refused_because_nothing_bounds_it(codec: str) -> None:
    batch = pa.ipc.open_stream(arrow_frame.decompress(ARROW[0][1])).read_next_batch()
    with pytest.raises(SchemaError, match="body is compressed"):
        decode_trajectory(stream_of(batch, pa.ipc.IpcWriteOptions(compression=codec)))


@pytest.mark.parametrize("rows", [0, 2])
def test_another_number_of_rows_is_refused(rows: int) -> None:
    entry = pa.ipc.open_stream(arrow_frame.decompress(ARROW[0][1])).read_all()
    table = pa.concat_tables([entry] * rows) if rows else entry.slice(0, 0)
    (batch,) = table.combine_chunks().to_batches() or [entry.to_batches()[0].slice(0, 0)]
    with pytest.raises(SchemaError, match=f"{rows} rows instead of 1"):
        decode_trajectory(stream_of(batch))


def test_stream_that_begins_with_a_record_batch_is_refused() -> None:
    raw = arrow_frame.decompress(ARROW[0][1])
    tail = raw[len(TRAJECTORY.head) :]
    with pytest.raises(SchemaError, match="not an Arrow stream"):
        decode_trajectory(zstandard.compress(tail))


@pytest.mark.pure
@pytest.mark.slow
def test_a_hundred_thousand_mutated_streams_neither_crash_nor_swell() -> None:
    program = (
        "import random, pathlib, zstandard\n"
        "from tests.unit.schemas import test_hostile as t\n"
        "r = random.Random(7)\n"
        "raws = [(d, t.arrow_frame.decompress(v)) for d, v in t.ARROW]\n"
        "read = 0\n"
        "for _ in range(100_000):\n"
        "    decode, raw = r.choice(raws)\n"
        "    data = bytearray(raw)\n"
        "    for _ in range(r.choice((1, 1, 2, 4, 16))):\n"
        "        at = r.randrange(len(data))\n"
        "        data[at] = r.choice((data[at] ^ (1 << r.randrange(8)), 0, 127, 255))\n"
        "    read += t.expect_read_or_refused(decode, zstandard.compress(bytes(data)))\n"
        # ru_maxrss would include the parent process.
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(read, status.split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    read, rss_kib = map(int, done.stdout.split())
    assert 0 < read < 100_000
    assert rss_kib < 400 * 1024


def stream_of(batch: pa.RecordBatch, options: pa.ipc.IpcWriteOptions | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return zstandard.compress(sink.getvalue().to_pybytes())
