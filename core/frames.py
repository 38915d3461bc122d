"""Frames of a byte stream: a length (4 bytes, big-endian) and a body. Standard library alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LENGTH_BYTES: Final = 4


def framed(body: bytes, bytes_max: int) -> bytes:
    """A body with its length in front. Raises ValueError where it is longer than `bytes_max`."""
    if len(body) > bytes_max:
        raise ValueError(f"{len(body)} bytes, above the limit of {bytes_max}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def unframed(buffer: bytearray, bytes_max: int) -> Iterator[bytes]:
    """Take the whole bodies off the front of `buffer`; a torn one stays.

    Raises ValueError for a length above `bytes_max`: then the stream is lost.
    """
    at = 0
    try:
        while len(buffer) - at >= LENGTH_BYTES:
            start = at + LENGTH_BYTES
            size = int.from_bytes(buffer[at:start], "big")
            if size > bytes_max:
                raise ValueError(f"a frame of {size} bytes")
            if len(buffer) < start + size:
                break
            at = start + size
            yield bytes(buffer[start:at])
    finally:
        del buffer[:at]
