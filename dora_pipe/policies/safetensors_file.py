"""Writes safetensors files from plain buffers, without torch; decides the order of their tensors.

Tensors lie sorted by name and the header is padded to eight bytes, so equal tensors give equal
files. Writing by hand keeps a full disk an `OSError` that the store can tell from a bad tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dora_pipe.policies.digest import DTYPE_BYTES, Entry, manifest_of, mapped, read_entries
from dora_pipe.schemas.policy import Manifest, Tensor

METADATA = {"format": "pt"}
"""transformers refuses a file that does not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor to write. `data` gives its row-major little-endian bytes and is called once.

    Example: ``Source(name="bias", dtype="F32", shape=(2,), data=lambda: bytes(8))``
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], bytes | memoryview]

    @property
    def bytes(self) -> int:
        """Size of the data in bytes."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


def write_tensors(path: Path, sources: Iterable[Source]) -> Manifest:
    """Write a safetensors file and describe it; nothing is synced. Raises OSError."""
    ordered = sorted(sources, key=lambda source: source.name)
    header = _header(ordered)
    described: list[Tensor] = []
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for source in ordered:
            with memoryview(source.data()).cast("B") as data:
                assert len(data) == source.bytes, source.name
                file.write(data)
                sha256 = hashlib.sha256(data).hexdigest()
            described.append(
                Tensor(name=source.name, dtype=source.dtype, shape=source.shape, sha256=sha256)
            )
    return manifest_of(described, sum(source.bytes for source in ordered))


@contextmanager
def file_sources(path: Path) -> Iterator[list[Source]]:
    """Every tensor of a safetensors file, to be written again. Raises PolicyError."""
    entries = read_entries(path)
    with mapped(path) as data:

        def of(entry: Entry) -> Callable[[], bytes]:
            return lambda: bytes(data[entry.start : entry.end])

        yield [
            Source(name=one.name, dtype=one.dtype, shape=one.shape, data=of(one)) for one in entries
        ]


def manifest_in_memory(sources: Iterable[Source]) -> Manifest:
    """The manifest that `write_tensors` would return, without writing."""
    described, size_bytes = [], 0
    for source in sources:
        with memoryview(source.data()).cast("B") as data:
            sha256 = hashlib.sha256(data).hexdigest()
            size_bytes += len(data)
        described.append(
            Tensor(name=source.name, dtype=source.dtype, shape=source.shape, sha256=sha256)
        )
    return manifest_of(described, size_bytes)


def _header(sources: Iterable[Source]) -> bytes:
    fields: dict[str, Mapping[str, object]] = {"__metadata__": METADATA}
    at = 0
    for source in sources:
        fields[source.name] = {
            "dtype": source.dtype,
            "shape": list(source.shape),
            "data_offsets": [at, at + source.bytes],
        }
        at += source.bytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)
