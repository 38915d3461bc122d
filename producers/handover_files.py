"""KV caches in a directory that the workers of one machine share: decides what a file must be.

    <run>/handover/<sha256>.safetensors

A file appears at once under the digest of its bytes: temporary name, then renamed. It is not
synced: a cache that a power cut takes is prefilled again, and a half-written one does not have its
digest. Its arrays are read from a memory map, so that a file may be deleted as soon as it was
fetched and costs its reader no memory of its own. A worker on another machine does not find it.

Files are deleted by the worker that imported them, at the end of a run and when it starts; what
is forgotten meanwhile (its reader died) goes when it is older than `AGE_MAX_NS` and something new
is put.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np

from dora_pipe.clock import Clock
from dora_pipe.errors import PolicyError, SchemaError
from dora_pipe.policies.digest import Entry, read_header
from dora_pipe.producers.engines.port import Array, Kv
from dora_pipe.producers.handover import (
    GONE,
    KV_BYTES_MAX,
    NO_ROOM,
    OTHER_DIGEST,
    OTHER_REQUEST,
    TOO_LARGE,
    UNREADABLE,
    KvLabel,
    Lost,
)
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import decode, encode

DIRECTORY_BYTES_MAX: Final = 16 * 1024**3
"""All files together; beyond that requests are prefilled."""

AGE_MAX_NS: Final = 600_000_000_000
"""A file that nobody has fetched for so long belongs to a request that went on without it."""

HEADER_BYTES: Final = 64 * 1024
"""What a file may have beside its arrays."""

METADATA: Final = "dora-pipe kv"
"""The one text of a file: a `_Beside` as JSON. Several would stand in an order left to chance."""

SUFFIX: Final = ".safetensors"
TEMPORARY: Final = ".tmp-"

_DIGEST: Final = re.compile("[0-9a-f]{64}")
_DTYPES: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"} | {
    "U64": "<u8",
    "U8": "u1",
}
_COUNTER = itertools.count()


class _Beside(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside the arrays; see `KvLabel` and `Kv`."""

    trajectory: str
    prefix: str
    weights: str
    layout: str
    tokens: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


_BESIDE: Final = msgspec.json.Decoder(_Beside)


class DirectoryHandover:
    """See the module. The directory is made when the first cache is put."""

    def __init__(self, root: Path, *, clock: Clock, bytes_max: int = DIRECTORY_BYTES_MAX) -> None:
        self._root = root
        self._clock = clock
        self._bytes_max = bytes_max

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """Write a file, unless there is no room for it."""
        if kv.bytes > KV_BYTES_MAX:
            return Lost(TOO_LARGE)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if self._used_bytes() + kv.bytes > self._bytes_max:
                return Lost(NO_ROOM)
            data = _packed(label, kv)
            blob = Blob(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
            partial = self._root / f"{TEMPORARY}{os.getpid()}-{next(_COUNTER)}"
            try:
                partial.write_bytes(data)
                partial.replace(self._path(blob))
            finally:
                partial.unlink(missing_ok=True)
        except OSError:
            return Lost(NO_ROOM)
        return blob

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """Map a file; what has another digest is deleted."""
        if not _DIGEST.fullmatch(blob.sha256):
            return Lost(UNREADABLE)
        if not 0 < blob.bytes <= KV_BYTES_MAX + HEADER_BYTES:
            return Lost(TOO_LARGE)
        path = self._path(blob)
        try:
            if path.stat().st_size != blob.bytes:
                return self._damaged(blob)
            # Copy-on-write: torch takes no array that it must not write to.
            data = np.memmap(path, np.uint8, mode="c")
            if hashlib.sha256(data.data).hexdigest() != blob.sha256:
                return self._damaged(blob)
            entries, metadata = read_header(path)
        except FileNotFoundError:
            return Lost(GONE)
        except (OSError, ValueError, PolicyError):
            return Lost(UNREADABLE)
        return _unpacked(label, data, entries, metadata)

    def drop(self, blob: Blob) -> None:
        """Delete the file, if it is there. Whoever has mapped it can go on reading."""
        if _DIGEST.fullmatch(blob.sha256):
            _delete(self._path(blob))

    def clear(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _path(self, blob: Blob) -> Path:
        return self._root / f"{blob.sha256}{SUFFIX}"

    def _damaged(self, blob: Blob) -> Lost:
        self.drop(blob)
        return Lost(OTHER_DIGEST)

    def _used_bytes(self) -> int:
        """Bytes of all files, after those that nobody will fetch are gone."""
        used, oldest_ns = 0, self._clock.wall_ns() - AGE_MAX_NS
        for path in _files(self._root):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            if facts.st_mtime_ns < oldest_ns:
                _delete(path)
            else:
                used += facts.st_size
        return used


def _files(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        if path.suffix == SUFFIX or path.name.startswith(TEMPORARY):
            yield path


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # a cache that stays costs room, and is cleared with the next run


def _packed(label: KvLabel, kv: Kv) -> bytes:
    """The bytes of a file."""
    from safetensors.numpy import save

    beside = _Beside(
        trajectory=label.trajectory,
        prefix=label.prefix,
        weights=kv.weights,
        layout=kv.layout,
        tokens=kv.tokens,
    )
    return bytes(save(dict(kv.arrays), {METADATA: encode(beside).decode()}))


def _unpacked(
    label: KvLabel, data: Array, entries: list[Entry], metadata: dict[str, str]
) -> Kv | Lost:
    """The cache in the bytes of a file, if it is this request's."""
    try:
        beside = decode(metadata.get(METADATA, "").encode(), _BESIDE)
    except SchemaError:
        return Lost(UNREADABLE)
    if (beside.trajectory, beside.prefix) != (label.trajectory, label.prefix):
        return Lost(OTHER_REQUEST)
    arrays: dict[str, Array] = {}
    for entry in entries:
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            return Lost(UNREADABLE)
        arrays[entry.name] = data[entry.start : entry.end].view(dtype).reshape(entry.shape)
    return Kv(tokens=beside.tokens, layout=beside.layout, weights=beside.weights, arrays=arrays)
