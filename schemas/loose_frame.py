"""A zstd frame whose end lies there as it is: for bytes in which nothing is found to compress.

RFC 8878, 3.1.1: a frame is a header, blocks and perhaps a checksum. Blocks of type `raw` hold their
bytes, `RLE` one byte and how often it comes; both leave alone what a compressed block refers to, so
they may stand behind compressed ones that were made as a frame of their own. Every zstd reader
opens it, at the speed of copying. It has no checksum: that is a second pass over all bytes, and
what a record is made of has its sha256 beside it.
"""

from __future__ import annotations

import struct
from typing import Any, Final

import zstandard

BLOCK_BYTES_MAX: Final = 128 * 1024
WINDOW_BYTES: Final = 1 << 20
"""That a reader has to provide; what is compressed in front refers less far back."""

_HEADER: Final = struct.Struct("<4sBBI")
_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_SIZE_IN_FOUR_BYTES: Final = 2 << 6
_WINDOW: Final = (WINDOW_BYTES.bit_length() - 1 - 10) << 3
_BLOCK_HEAD_BYTES: Final = 3
_LAST: Final = 1
_RLE: Final = 1 << 1


def loose_frame(
    front: bytes, loose: bytes | memoryview, end: bytes, compressor: zstandard.ZstdCompressor
) -> bytes:
    """One frame of all three, `front` compressed.

    `compressor` writes neither checksum nor size; `end` is some bytes behind what is loose.
    """
    packed = compressor.compress(front)
    said = zstandard.get_frame_parameters(packed)
    assert said.window_size <= WINDOW_BYTES, "a window that the header does not promise"
    assert not said.has_checksum
    size = len(front) + len(loose) + len(end)
    pieces: list[Any] = [_HEADER.pack(_MAGIC, _SIZE_IN_FOUR_BYTES, _WINDOW, size)]
    pieces.append(_goes_on(packed[zstandard.frame_header_size(packed) :]))
    seen = memoryview(loose)
    for at in range(0, len(seen), BLOCK_BYTES_MAX):
        pieces += _block(seen[at : at + BLOCK_BYTES_MAX])
    pieces += (_block_head(len(end), _LAST), end)
    return b"".join(pieces)


def _block(data: memoryview) -> tuple[bytes, memoryview]:
    if data[0] == data[-1] and data[1:] == data[:-1]:
        return _block_head(len(data), _RLE), data[:1]
    return _block_head(len(data), 0), data


def _block_head(size: int, kind: int) -> bytes:
    return (size << 3 | kind).to_bytes(_BLOCK_HEAD_BYTES, "little")


def _goes_on(blocks: bytes) -> bytes:
    """The blocks of a frame, the last of them no longer said to be the last."""
    at = 0
    while not (head := int.from_bytes(blocks[at : at + _BLOCK_HEAD_BYTES], "little")) & _LAST:
        at += _BLOCK_HEAD_BYTES + (1 if head & 0b110 == _RLE else head >> 3)
    return blocks[:at] + bytes((blocks[at] ^ _LAST,)) + blocks[at + 1 :]
