"""What identifies a policy: the digest of its weights, independent of files and sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import msgspec

PolicyDtype = Literal["float32", "bfloat16"]
"""What weights are published in."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One tensor of a policy; `sha256` (hex) covers its row-major little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A policy's weights: what they are, not where they lie. Tied tensors stand once."""

    digest: str
    """Weights digest (hex): `weights_digest` of `tensors`."""
    bytes: int
    tensors: tuple[Tensor, ...]

    @property
    def dtype(self) -> PolicyDtype:
        """What the weights are published in; of an adapter, what its matrices are."""
        return "bfloat16" if any(one.dtype == "BF16" for one in self.tensors) else "float32"


class Blob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content-addressed bytes: a file of the policy store, or a KV cache on its way."""

    sha256: str
    bytes: int
    peer: str = ""
    """Where a KV cache can be fetched from another machine; see docs/storage.md."""


class Fallback(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of a version's weights that is not there or was damaged, and what was taken instead.

    Example: ``Fallback(digest="ab12...", why="patches/ab12....patch in s3://policies/demo is not
    what its name says", taken="weights/ab12....safetensors", bytes=61_000)``
    """

    digest: str
    """Of the version (hex)."""
    why: str
    """What was wrong with which file: its name, which has a digest, and its place."""
    taken: str
    """Name of the file that was taken; of a patch, with those that it is made on."""
    bytes: int = 0
    """Fetched in its place from the store or from peers; 0 where all of it was on the machine."""
    absent: bool = False
    """The store has no other form of this version: it was lost, unless the version's commit says
    that there never was one."""


def weights_digest(tensors: Iterable[Tensor]) -> str:
    """sha256 over the sorted (name, dtype, shape, sha256 of bytes); hex."""
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        shape = ",".join(str(size) for size in tensor.shape)
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{shape}\0{tensor.sha256}\n".encode())
    return digest.hexdigest()
