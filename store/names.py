"""Names of files in a policy store, and checks of their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import Final, Literal

from dora_pipe.core.errors import PolicyError
from dora_pipe.store.delta import opened_delta
from dora_pipe.store.safetensors_file import read_manifest

BlobKind = Literal["optimizer", "contributions", "change"]

_SUFFIX: Final[dict[BlobKind, str]] = {
    "optimizer": ".safetensors",
    "contributions": ".arrow",
    "change": ".json",
}


def weights_name(digest: str) -> str:
    return f"weights/{digest}.safetensors"


def delta_name(digest: str) -> str:
    """Return the name of the delta that makes a version."""
    return f"deltas/{digest}.delta"


def blob_name(kind: BlobKind, sha256: str) -> str:
    return f"{kind}/{sha256}{_SUFFIX[kind]}"


def digest_in(name: str) -> str:
    """Return the digest in a name."""
    return name.split("/")[1].partition(".")[0]


def assets_digest(files: Collection[Path]) -> str:
    """Return the hex sha256 over the sorted (file name, sha256)."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        digest.update(f"{file.name}\0{file_sha256(file)}\n".encode())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """Return the hex sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_weights(path: Path, digest: str) -> bool:
    """Return whether the weights have this digest."""
    try:
        return read_manifest(path).digest == digest
    except PolicyError:
        return False


def makes_version(path: Path, digest: str) -> bool:
    """Return whether a delta is undamaged and makes this version."""
    try:
        with opened_delta(path) as delta:
            return delta.after == digest
    except PolicyError:
        return False
