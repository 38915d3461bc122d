"""Transfer of KV caches between workers.

A lost cache costs only a prefill, so failures return `Lost` with a fixed reason. A cache is a
safetensors file with one array and one JSON metadata entry; equal caches have equal bytes.
Written here because the library would copy the array.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final, Protocol

import msgspec
import numpy as np

from dora_pipe.core.errors import PolicyError, SchemaError
from dora_pipe.producers.engines.engine import Array, Kv
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import decode, encode
from dora_pipe.store.safetensors_file import parse_header
from dora_pipe.store.transfers.transfers import (
    BLOB_BYTES_MAX,
    GONE,
    NO_ROOM,
    TOO_LARGE,
    UNREADABLE,
    Lost,
)

OTHER_REQUEST: Final = "another request"

METADATA: Final = "dora-pipe kv"
"""Single metadata entry, since the order of several is not fixed."""

WAIT_S: Final = 2.0
BYTES_PER_S_MIN: Final = 50_000_000
"""A slower transfer, after `WAIT_S`, is replaced by a prefill."""

_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"} | {
    "U64": "<u8",
    "U16": "<u2",
    "U8": "|u1",
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLabel:
    """Identity of a KV cache, compared on fetch."""

    trajectory: str
    prefix: str
    """sha256 (hex) of the covered token ids, 8 bytes each, little endian."""


class Handover(Protocol):
    """Stores KV caches until they are fetched. Calls may block and come from one thread."""

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Store a cache under the digest of its bytes."""

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """Return the cache with this digest and label."""

    def drop(self, blob: Blob) -> None:
        """Delete a cache; unknown ones are ignored."""

    def clear(self) -> None:
        """Delete all caches at the end of the run."""


def label_of(trajectory: str, token_ids: Sequence[int]) -> KvLabel:
    """Return the label of a sequence's cache, which covers all tokens but the last."""
    covered = np.asarray(token_ids[:-1], "<i8").tobytes()
    return KvLabel(trajectory=trajectory, prefix=hashlib.sha256(covered).hexdigest())


class NoHandover:
    """Handover that stores nothing; requests are prefilled."""

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        return Lost(NO_ROOM)

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        return Lost(GONE)

    def drop(self, blob: Blob) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class MemoryHandover:
    """Handover within one process, for tests and the simulator."""

    kept: dict[str, tuple[KvLabel, Kv]] = field(default_factory=dict)

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        digest = hashlib.sha256(f"{label}{kv.layout}{kv.weights}{kv.tokens}".encode())
        digest.update(kv.array.tobytes())
        self.kept[digest.hexdigest()] = (label, kv)
        return Blob(sha256=digest.hexdigest(), bytes=kv.bytes)

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        if blob.sha256 not in self.kept:
            return Lost(GONE)
        kept_label, kv = self.kept[blob.sha256]
        return kv if kept_label == label else Lost(OTHER_REQUEST)

    def drop(self, blob: Blob) -> None:
        self.kept.pop(blob.sha256, None)

    def clear(self) -> None:
        self.kept.clear()


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    trajectory: str
    prefix: str
    weights: str
    layout: str
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


_HEADER: Final = msgspec.json.Decoder(_Header)


class Transfers(Protocol):
    """The part of `MappedFiles` used here, which needs no clock."""

    def offer(self, chunks: Sequence[memoryview]) -> Blob | Lost: ...
    def fetch(self, blob: Blob, *, timeout_s: float) -> Array | Lost: ...
    def drop(self, blob: Blob) -> None: ...
    def clear(self) -> None: ...


class KvHandover:
    """Production `Handover`."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        if kv.bytes > BLOB_BYTES_MAX:
            return Lost(TOO_LARGE)
        return self._transfers.offer(packed(label, kv))

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        fetched = self._transfers.fetch(blob, timeout_s=WAIT_S + blob.bytes / BYTES_PER_S_MIN)
        return fetched if isinstance(fetched, Lost) else unpacked(label, fetched)

    def drop(self, blob: Blob) -> None:
        self._transfers.drop(blob)

    def clear(self) -> None:
        self._transfers.clear()


def packed(label: KvLabel, kv: Kv) -> list[memoryview]:
    """Encode a cache without copying its array."""
    header = _Header(
        trajectory=label.trajectory,
        prefix=label.prefix,
        weights=kv.weights,
        layout=kv.layout,
        tokens=kv.tokens,
    )
    assert kv.array.flags.c_contiguous, "the array of a cache is row-major"
    fields = {
        "__metadata__": {METADATA: encode(header).decode()},
        "kv": {
            "dtype": _NAMES[kv.array.dtype.str],
            "shape": list(kv.array.shape),
            "data_offsets": [0, kv.array.nbytes],
        },
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the array
    head = memoryview(struct.pack("<Q", len(text)) + text)
    return [head, kv.array.reshape(-1).view(np.uint8).data]


def unpacked(label: KvLabel, data: Array) -> Kv | Lost:
    """Decode the cache in these bytes (uint8) and verify its label; the array shares memory."""
    try:
        entries, metadata = parse_header(data.data, "a KV cache")
        header = decode(metadata.get(METADATA, "").encode(), _HEADER)
    except (PolicyError, SchemaError):
        return Lost(UNREADABLE)
    if (header.trajectory, header.prefix) != (label.trajectory, label.prefix):
        return Lost(OTHER_REQUEST)
    if len(entries) != 1 or entries[0].dtype not in _DTYPES:
        return Lost(UNREADABLE)
    (entry,) = entries
    array = data[entry.start : entry.end].view(_DTYPES[entry.dtype]).reshape(entry.shape)
    return Kv(tokens=header.tokens, layout=header.layout, weights=header.weights, array=array)
