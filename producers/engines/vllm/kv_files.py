"""Files that exchange KV caches between a worker and a vLLM server, in numpy's format; without vLLM
and torch."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dora_pipe.producers.engines.engine import Array, Kv

KV_ARRAY: Final = "kv"
"""Name of the array: [layers, 2, tokens, kv_heads, head_dim], keys first."""

MARK: Final = "mark"
"""File that shows whether the server sees the same folder."""

SPARE_BYTES: Final = 1 << 26
"""Disk space to leave free."""


class CacheFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a server's KV caches; empty `layout`: no export."""

    layout: str = ""
    dtype: str = ""
    layers: int = 0
    heads: int = 0
    """Key-value heads of all processes."""
    width: int = 0
    """Head size."""

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (self.layers, 2, tokens, self.heads, self.width)

    def kv(self, array: Array, weights: str) -> Kv:
        return Kv(
            tokens=array.shape[2], layout=self.layout, weights=weights, arrays={KV_ARRAY: array}
        )


class KvFolder:
    """Temporary folder of the worker.

    Example: ``path = folder.put("7", array)``, then `remove`.
    """

    def __init__(self) -> None:
        """Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix="dora-pipe-kv-"))
        self._gone = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self.mark = secrets.token_hex(16)
        (self.path / MARK).write_text(self.mark)

    def has_room(self, size: int) -> bool:
        return shutil.disk_usage(self.path).free > size + SPARE_BYTES

    def put(self, name: str, array: Array) -> Path:
        """Write a cache. Raises OSError."""
        path = self.path / f"{name}.npy"
        np.save(path, array, allow_pickle=False)
        return path

    def empty(self, name: str, facts: CacheFacts, tokens: int) -> Path:
        """Create a file to fill. Raises OSError."""
        path = self.path / f"{name}.npy"
        shape = facts.shape(tokens)
        np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(facts.dtype), shape=shape)
        return path

    def taken(self, path: Path) -> Array:
        """Map a file and unlink it."""
        array = opened(path)
        path.unlink()
        return array

    def remove(self, name: str) -> None:
        (self.path / f"{name}.npy").unlink(missing_ok=True)

    def close(self) -> None:
        self._gone()


def opened(path: Path, *, write: bool = False) -> Array:
    """Map an array, private unless `write`. Raises OSError or ValueError."""
    array: Array = np.load(path, mmap_mode="r+" if write else "c", allow_pickle=False)
    return array


def is_seen(folder: Path, mark: str) -> bool:
    """Return whether this process sees the folder."""
    try:
        return (folder / MARK).read_text() == mark
    except OSError:
        return False


def array_of(facts: CacheFacts, tokens: int) -> tuple[str, str, tuple[int, ...]]:
    """Return name, type and shape of the array."""
    return KV_ARRAY, facts.dtype, facts.shape(tokens)
