"""KV caches as safetensors through any `Transfers`: decides what the bytes of a cache must be.

One array per name of the engine's own layout, and one metadata entry with the rest as JSON. Equal
caches have equal bytes. They are written here, not by the library, because that would copy every
array once more; any reader of safetensors reads them.
"""

from __future__ import annotations

import json
import struct
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from dora_pipe.errors import PolicyError, SchemaError
from dora_pipe.policies.digest import Entry, parse_header
from dora_pipe.producers.engines.port import Array, Kv
from dora_pipe.producers.handover import OTHER_REQUEST, KvLabel
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import decode, encode
from dora_pipe.transfers.port import BLOB_BYTES_MAX, TOO_LARGE, UNREADABLE, Lost, Transfers

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
