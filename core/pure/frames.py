"""Stream frames: length (4 bytes, big-endian) and body. Uses only the standard library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

LENGTH_BYTES: Final = 4


def framed(body: bytes, bytes_max: int) -> bytes:
    """Return a frame. Raises ValueError above `bytes_max`."""
    if len(body) > bytes_max:
        raise ValueError(f"{len(body)} bytes, above the limit of {bytes_max}")
    return len(body).to_bytes(LENGTH_BYTES, "big") + body


def unframed(buffer: bytearray, bytes_max: int) -> Iterator[bytes]:
    """Remove and yield complete bodies from `buffer`.

    Raises ValueError for a length above `bytes_max`, after which the stream is unusable.
    """
    offset = 0
    try:
        while len(buffer) - offset >= LENGTH_BYTES:
            start = offset + LENGTH_BYTES
            size = int.from_bytes(buffer[offset:start], "big")
            if size > bytes_max:
                raise ValueError(f"a frame of {size} bytes")
            if len(buffer) < start + size:
                break
            offset = start + size
            yield bytes(buffer[start:offset])
    finally:
        del buffer[:offset]
