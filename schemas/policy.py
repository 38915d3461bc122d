"""Identity of a policy: the digest of its weights, independent of files and sharding."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal

import msgspec

PolicyDtype = Literal["float32", "bfloat16"]
"""Published dtype of weights."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Tensor of a policy; `sha256` (hex) covers its row-major little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of a policy without location; tied tensors appear once."""

    digest: str
    bytes: int
    tensors: tuple[Tensor, ...]

    @property
    def dtype(self) -> PolicyDtype:
        """Return the published dtype; that of its matrices for an adapter."""
        return "bfloat16" if any(tensor.dtype == "BF16" for tensor in self.tensors) else "float32"


class Blob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content-addressed bytes: a file of the policy store, or a KV cache in transfer."""

    sha256: str
    bytes: int
    peer: str = ""
    """Address of a KV cache for other machines."""


def weights_digest(tensors: Iterable[Tensor]) -> str:
    """Return the hex sha256 over the sorted (name, dtype, shape, sha256 of bytes)."""
    digest = hashlib.sha256()
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        shape = ",".join(str(size) for size in tensor.shape)
        digest.update(f"{tensor.name}\0{tensor.dtype}\0{shape}\0{tensor.sha256}\n".encode())
    return digest.hexdigest()
