"""What the KV cache of a running request in vLLM is, and the files by which one comes from a server
and goes to it, in a folder that the worker and the server's processes see; decides their form.

A file is an array in numpy's format. The worker makes it, the server's processes write their own
heads into it, or read them from it. It imports no vLLM and no torch.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from dora_pipe.producers.engines.port import Array, Kv

KV_ARRAY: Final = "kv"
"""The one array of an exported cache: [layers, 2, tokens, kv_heads, head_dim], keys first."""

MARK: Final = "mark"
"""A file of the folder, by whose words a server tells whether it sees this folder and no other."""

SPARE_BYTES: Final = 1 << 26
"""That must be left where a cache is written."""


class CacheFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The KV caches of a vLLM, whatever processes share them; of no `layout` where none can leave
    or arrive."""

    layout: str = ""
    dtype: str = ""
    """numpy's name of the type."""
    layers: int = 0
    heads: int = 0
    """Of keys and values, of all processes."""
    width: int = 0
    """Of a head."""

    def shape(self, tokens: int) -> tuple[int, ...]:
        """Of the array of so many positions."""
        return (self.layers, 2, tokens, self.heads, self.width)

    def kv(self, array: Array, weights: str) -> Kv:
        """A cache that weights of this digest have made."""
        return Kv(
            tokens=array.shape[2], layout=self.layout, weights=weights, arrays={KV_ARRAY: array}
        )


class KvFolder:
    """The worker's side of such files; a folder of its own, which goes with it.

    Example: ``path = folder.put("7", array)``, and `remove` when the server has it.
    """

    def __init__(self) -> None:
        """Raises OSError where there is no room for temporary files."""
        self.path = Path(tempfile.mkdtemp(prefix="dora-pipe-kv-"))
        self._gone = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        self.mark = secrets.token_hex(16)
        (self.path / MARK).write_text(self.mark)

    def has_room(self, size: int) -> bool:
        """Whether so many bytes can be written."""
        return shutil.disk_usage(self.path).free > size + SPARE_BYTES

    def put(self, name: str, array: Array) -> Path:
        """Write a cache. Raises OSError."""
        path = self.path / f"{name}.npy"
        np.save(path, array, allow_pickle=False)
        return path

    def empty(self, name: str, facts: CacheFacts, tokens: int) -> Path:
        """A file that the server's processes fill. Raises OSError."""
        path = self.path / f"{name}.npy"
        shape = facts.shape(tokens)
        np.lib.format.open_memmap(path, mode="w+", dtype=np.dtype(facts.dtype), shape=shape)
        return path

    def taken(self, path: Path) -> Array:
        """What it holds, mapped; its name is gone."""
        array = opened(path)
        path.unlink()
        return array

    def remove(self, name: str) -> None:
        """Forget a file; unknown ones are ignored."""
        (self.path / f"{name}.npy").unlink(missing_ok=True)

    def close(self) -> None:
        self._gone()


def opened(path: Path, *, write: bool = False) -> Array:
    """The array of a file, mapped; what is written to it stays here unless it is opened to `write`.
    Raises OSError or ValueError for what is none."""
    array: Array = np.load(path, mmap_mode="r+" if write else "c", allow_pickle=False)
    return array


def is_seen(folder: Path, mark: str) -> bool:
    """Whether this process sees the folder that has this mark."""
    try:
        return (folder / MARK).read_text() == mark
    except OSError:
        return False


def array_of(facts: CacheFacts, tokens: int) -> tuple[str, str, tuple[int, ...]]:
    """Name, type and shape of the one array of a cache; of no meaning without a layout."""
    return KV_ARRAY, facts.dtype, facts.shape(tokens)
