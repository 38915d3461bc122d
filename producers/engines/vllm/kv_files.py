"""Files that exchange KV caches between a worker and a vLLM server, in numpy's format; without vLLM
and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dora_pipe.producers.engines.engine import Array, Kv

MARK: Final = "mark"
"""File that shows whether the server sees the same folder."""


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
        """Return the shape of an exported cache, keys first."""
        return (self.layers, 2, tokens, self.heads, self.width)

    def kv(self, array: Array, weights: str) -> Kv:
        return Kv(tokens=array.shape[2], layout=self.layout, weights=weights, array=array)


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
