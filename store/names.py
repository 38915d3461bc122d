"""Files of a policy store: what they are called, and whether they hold what they are called.

A name is a folder for the kind and the digest of what the file holds; it is compared by reading all
of that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal

from dora_pipe.core.errors import PolicyError
from dora_pipe.store.patch import opened_patch
from dora_pipe.store.safetensors_file import read_manifest

BlobKind = Literal["optimizer", "contributions", "change"]

READ_BYTES: Final = 1 << 20

_SUFFIX: Final[dict[BlobKind, str]] = {
    "optimizer": ".safetensors",
    "contributions": ".arrow",
    "change": ".json",
}


def weights_name(digest: str) -> str:
    return f"weights/{digest}.safetensors"


def patch_name(digest: str) -> str:
    """The name of the patch that makes a version, in a store."""
    return f"patches/{digest}.patch"


def blob_name(kind: BlobKind, sha256: str) -> str:
    return f"{kind}/{sha256}{_SUFFIX[kind]}"


def digest_in(name: str) -> str:
    """The digest that a name of the store carries; something else for an unfinished file."""
    return name.split("/")[1].partition(".")[0]


def assets_digest(files: Collection[Path]) -> str:
    """sha256 over the sorted (file name, sha256 of its bytes); hex."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}\0{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def is_weights(path: Path, digest: str) -> bool:
    """Whether a file has weights of this digest, from reading all of it."""
    try:
        return read_manifest(path).digest == digest
    except PolicyError:
        return False


def is_named(path: Path) -> bool:
    """The same, of the digest that is its name."""
    return is_weights(path, path.stem)


def makes_version(path: Path, digest: str) -> bool:
    """Whether a patch is one, undamaged, and makes this version."""
    try:
        with opened_patch(path) as patch:
            return patch.after == digest
    except PolicyError:
        return False
