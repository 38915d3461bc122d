"""A frame whose end is not compressed is one that every reader of zstd opens."""

from __future__ import annotations

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.arrow_frame import WINDOW_BYTES_MAX, compress_front, decompress
from dora_pipe.schemas.loose_frame import BLOCK_BYTES_MAX, WINDOW_BYTES, loose_frame


def frame(front: bytes, loose: bytes, *, level: int = 1) -> bytes:
    compressor = zstandard.ZstdCompressor(level=level, write_content_size=False)
    return loose_frame(front, loose, b"the end", compressor)


@given(
    front=st.binary(min_size=1, max_size=300),
    times=st.integers(1, 2_000),
    loose=st.binary(min_size=1, max_size=50),
    more=st.integers(1, 9_000),
    level=st.sampled_from([1, -5]),
)
def test_what_was_put_in_comes_out(
    front: bytes, times: int, loose: bytes, more: int, level: int
) -> None:
    value = frame(front * times, loose * more, level=level)
    raw = front * times + loose * more + b"the end"
    assert zstandard.frame_content_size(value) == len(raw)
    assert decompress(value) == raw
    assert pa.CompressedInputStream(pa.BufferReader(value), "zstd").read() == raw


@pytest.mark.parametrize("size", [1, BLOCK_BYTES_MAX - 1, BLOCK_BYTES_MAX, 3 * BLOCK_BYTES_MAX + 1])
def test_loose_bytes_lie_there_in_blocks_and_those_that_are_all_the_same_once(size: int) -> None:
    loose = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    blocks = -(-size // BLOCK_BYTES_MAX)
    assert loose[:BLOCK_BYTES_MAX] in frame(b"front", loose)
    assert len(frame(b"front", loose)) - len(frame(b"front", b"")) == size + 3 * blocks
    assert decompress(frame(b"front", b"z" * size)) == b"front" + b"z" * size + b"the end"
    assert len(frame(b"front", b"z" * size)) - len(frame(b"front", b"")) == 4 * blocks


def test_what_it_asks_of_a_reader_is_bounded() -> None:
    front = bytes(3 * WINDOW_BYTES) + b"seldom" * 1_000
    value = frame(front, b"loose", level=-5)
    assert zstandard.get_frame_parameters(value).window_size == WINDOW_BYTES < WINDOW_BYTES_MAX
    assert decompress(value).startswith(front)


def test_a_record_that_ends_too_early_or_goes_on_is_refused() -> None:
    value = compress_front(b"front" * 100, bytes(range(256)) * 700)
    for changed in (value[:-1], value[:-200_000], value + b"\0"):
        with pytest.raises(SchemaError, match="not a zstd frame"):
            decompress(changed)
