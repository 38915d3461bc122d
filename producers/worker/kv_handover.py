"""How KV caches of moved requests go from worker to worker, and what the bytes of one must be.

A KV cache is worth nothing but time: whoever does not get one prefills, with the same result. So
nothing here is an error. What cannot be kept or got is `Lost`, with the reason in a few words, the
same words every time, so that they can be counted.

Through `Transfers` a cache goes as safetensors: one array per name of the engine's own layout, and
one metadata entry with the rest as JSON. Equal caches have equal bytes. They are written here, not
by the library, because that would copy every array once more; any reader of safetensors reads them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Protocol

import msgspec
import numpy as np

from dora_pipe.core.errors import PolicyError, SchemaError
from dora_pipe.producers.engines.port import Array, Kv
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import decode, encode
from dora_pipe.store.safetensors_file import Entry, parse_header
from dora_pipe.store.transfers.port import (
    BLOB_BYTES_MAX,
    GONE,
    NO_ROOM,
    TOO_LARGE,
    UNREADABLE,
    Lost,
    Transfers,
)

OTHER_REQUEST: Final = "another request"
"""Of those reasons that only a cache can have; the others are those of every transfer."""

METADATA: Final = "dora-pipe kv"
"""The one text of a file: a `_Beside` as JSON. Several would stand in an order left to chance."""

WAIT_S: Final = 2.0
BYTES_PER_S_MIN: Final = 50_000_000
"""A cache that comes more slowly than this, after `WAIT_S`, is prefilled instead."""

_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"} | {
    "U64": "<u8",
    "U16": "<u2",
    "U8": "|u1",
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLabel:
    """Whose KV cache it is: written beside it, and asked for when it is fetched."""

    trajectory: str
    prefix: str
    """sha256 (hex) of the token ids that the cache covers, 8 bytes each, little endian."""


class Handover(Protocol):
    """Keeps KV caches until they are fetched. Calls may block; they come from one thread.

    `KvHandover` is the one for production, through any way of transfer.
    """

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Keep a cache under the digest of its bytes."""

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """The cache with this digest and label."""

    def drop(self, blob: Blob) -> None:
        """Forget a cache; unknown ones are ignored."""

    def clear(self) -> None:
        """Forget all of them, whoever put them: the run is over."""


def label_of(trajectory: str, token_ids: Sequence[int]) -> KvLabel:
    """The label of the cache of a sequence: of all its tokens but the last."""
    covered = np.asarray(token_ids[:-1], "<i8").tobytes()
    return KvLabel(trajectory=trajectory, prefix=hashlib.sha256(covered).hexdigest())


class NoHandover:
    """For a worker that has no place to hand anything over: its requests are prefilled."""

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Nothing is kept."""
        return Lost(NO_ROOM)

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """Nothing is there."""
        return Lost(GONE)

    def drop(self, blob: Blob) -> None:
        """Nothing to forget."""

    def clear(self) -> None:
        """Nothing to forget."""


@dataclass(slots=True)
class MemoryHandover:
    """For workers of one process: tests and the simulator.

    Example: ``MemoryHandover()``, shared by all workers that are said to run on one machine.
    """

    kept: dict[str, tuple[KvLabel, Kv]] = field(default_factory=dict)
    """By digest; a test may take away what it likes."""

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Keep the object itself."""
        digest = hashlib.sha256(f"{label}{kv.layout}{kv.weights}{kv.tokens}".encode())
        for name in sorted(kv.arrays):
            digest.update(name.encode())
            digest.update(kv.arrays[name].tobytes())
        self.kept[digest.hexdigest()] = (label, kv)
        return Blob(sha256=digest.hexdigest(), bytes=kv.bytes)

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """The object that was kept."""
        if blob.sha256 not in self.kept:
            return Lost(GONE)
        found, kv = self.kept[blob.sha256]
        return kv if found == label else Lost(OTHER_REQUEST)

    def drop(self, blob: Blob) -> None:
        self.kept.pop(blob.sha256, None)

    def clear(self) -> None:
        self.kept.clear()


class _Beside(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the arrays; see `KvLabel` and `Kv`."""

    trajectory: str
    prefix: str
    weights: str
    layout: str
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


_BESIDE: Final = msgspec.json.Decoder(_Beside)


class KvHandover:
    """See `Handover`; the bytes go through `transfers`.

    Example: ``KvHandover(MappedFiles(Path("runs/demo/handover"), clock=SystemClock()))``
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Offer a cache."""
        if kv.bytes > BLOB_BYTES_MAX:
            return Lost(TOO_LARGE)
        return self._transfers.offer(packed(label, kv))

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """Get a cache, as long as that takes less time than to make it again."""
        found = self._transfers.fetch(blob, timeout_s=WAIT_S + blob.bytes / BYTES_PER_S_MIN)
        return found if isinstance(found, Lost) else unpacked(label, found)

    def drop(self, blob: Blob) -> None:
        """Forget it, here and at the peer that offered it."""
        self._transfers.drop(blob)

    def clear(self) -> None:
        """Forget all of this place."""
        self._transfers.clear()


def packed(label: KvLabel, kv: Kv) -> list[memoryview]:
    """The bytes of a cache; arrays are not copied."""
    beside = _Beside(
        trajectory=label.trajectory,
        prefix=label.prefix,
        weights=kv.weights,
        layout=kv.layout,
        tokens=kv.tokens,
    )
    fields: dict[str, Any] = {"__metadata__": {METADATA: encode(beside).decode()}}
    # Wide types first, as the library has it: so every array is aligned.
    ordered = sorted(kv.arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    at = 0
    for name, array in ordered:
        fields[name] = {
            "dtype": _NAMES[array.dtype.str],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = memoryview(struct.pack("<Q", len(text)) + text)
    return [head, *(_bytes_of(array) for _, array in ordered)]


def unpacked(label: KvLabel, data: Array) -> Kv | Lost:
    """The cache in these bytes (uint8), if it is this request's; its arrays share their memory."""
    try:
        entries, metadata = parse_header(data.data, "a KV cache")
        beside = decode(metadata.get(METADATA, "").encode(), _BESIDE)
    except (PolicyError, SchemaError):
        return Lost(UNREADABLE)
    if (beside.trajectory, beside.prefix) != (label.trajectory, label.prefix):
        return Lost(OTHER_REQUEST)
    arrays: dict[str, Array] = {}
    for entry in entries:
        if entry.dtype not in _DTYPES:
            return Lost(UNREADABLE)
        arrays[entry.name] = _array(data, entry)
    return Kv(tokens=beside.tokens, layout=beside.layout, weights=beside.weights, arrays=arrays)


def _array(data: Array, entry: Entry) -> Array:
    return data[entry.start : entry.end].view(_DTYPES[entry.dtype]).reshape(entry.shape)


def _bytes_of(array: Array) -> memoryview:
    assert array.flags.c_contiguous, "the arrays of a cache lie row-major"
    return array.reshape(-1).view(np.uint8).data
