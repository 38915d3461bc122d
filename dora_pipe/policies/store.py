"""Where policies, checkpoints and contributions lie; it decides only how a file gets its name.

Everything is named by what it holds and appears at once: written under a temporary name, synced,
renamed, the directory synced. Only a commit in the log names a file, so a file without a commit is
an orphan: harmless, and left alone.

    <root>/weights/<weights digest>.safetensors
    <root>/optimizer/<sha256>.safetensors
    <root>/contributions/<sha256>.arrow
    <root>/assets/<assets digest>/config.json, tokenizer files
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, TypeVar

from dora_pipe.errors import PolicyError, ResourceError
from dora_pipe.policies import model_dir
from dora_pipe.policies.digest import read_manifest
from dora_pipe.schemas.policy import Blob, Manifest

BlobKind = Literal["optimizer", "contributions"]
T = TypeVar("T")

TEMPORARY: Final = ".tmp-"
"""How the name of an unfinished file begins."""

READ_BYTES: Final = 1 << 20
_SUFFIX: Final[dict[BlobKind, str]] = {"optimizer": ".safetensors", "contributions": ".arrow"}
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COUNTER = itertools.count()


class PolicyStore:
    """The policies directory of a run. Opening one creates nothing.

    Example: ``PolicyStore(Path("runs/demo/policies")).weights_path(digest)``
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def weights_path(self, digest: str) -> Path:
        """Where the weights with this digest (hex) lie, or would lie."""
        return self.root / "weights" / f"{digest}.safetensors"

    def optimizer_path(self, sha256: str) -> Path:
        """Where the optimizer state with this sha256 of its file lies, or would lie."""
        return self._blob_path("optimizer", sha256)

    def contributions_path(self, sha256: str) -> Path:
        """Where the contributions file with this sha256 lies, or would lie."""
        return self._blob_path("contributions", sha256)

    def assets_path(self, assets_digest: str) -> Path:
        """The directory of the config and tokenizer files with this digest."""
        return self.root / "assets" / assets_digest

    def import_model(self, directory: Path) -> tuple[Manifest, str]:
        """Put a model directory into the store: its manifest and the digest of its assets.

        Raises PolicyError for a directory that is not a model, ResourceError without room.
        """
        return model_dir.import_model(self, directory)

    def export_policy(self, digest: str, assets_digest: str, directory: Path) -> None:
        """Write a policy as a directory that transformers' `from_pretrained` loads.

        Raises UsageError when the directory holds something, PolicyError when the store's files
        are not there or not what they were.
        """
        model_dir.export_policy(self, digest, assets_digest, directory)

    def publish_weights(self, write: Callable[[Path], Manifest]) -> Manifest:
        """Let `write` fill a file and give it the name of the manifest it returns.

        Raises ResourceError when there is no room; nothing is then left under any name.
        """
        with self._temporary(self.root / "weights") as path:
            manifest = write(path)
            _settle(path, self.weights_path(manifest.digest))
        return manifest

    def publish_blob(self, kind: BlobKind, write: Callable[[Path], None]) -> Blob:
        """Let `write` fill a file and give it the name of its sha256. Raises ResourceError."""
        with self._temporary(self.root / kind) as path:
            write(path)
            blob = Blob(sha256=file_sha256(path), bytes=path.stat().st_size)
            _settle(path, self._blob_path(kind, blob.sha256))
        return blob

    def publish_assets(self, files: Collection[Path]) -> str:
        """Copy config and tokenizer files; returns their digest. Raises ResourceError."""
        digest = assets_digest(files)
        final = self.assets_path(digest)
        if final.is_dir():
            return digest
        with self._temporary(final.parent) as path:
            path.mkdir()
            for file in files:
                shutil.copyfile(file, path / file.name)
                _sync(path / file.name)
            _sync(path)
            if not final.is_dir():
                path.replace(final)
            _sync(final.parent)
        return digest

    def verify(self, digest: str) -> Manifest:
        """Read weights from the disk and compare. Raises PolicyError if they are not these."""
        manifest = read_manifest(self.weights_path(digest))
        if manifest.digest != digest:
            raise PolicyError(
                f"{self.weights_path(digest)} holds other weights ({manifest.digest[:12]}...)",
                hint="a file of the store was changed; `dora-pipe replay` makes it again",
            )
        return manifest

    def verify_blob(self, kind: BlobKind, sha256: str) -> Path:
        """The path of a blob whose bytes were just checked. Raises PolicyError."""
        path = self._blob_path(kind, sha256)
        if not path.is_file():
            raise PolicyError(f"no {kind} file at {path}")
        if file_sha256(path) != sha256:
            raise PolicyError(f"{path} was changed: its sha256 is another one")
        return path

    def orphans(self, named: Collection[str]) -> list[Path]:
        """Files and assets whose digest is not in `named`, unfinished ones among them; sorted."""
        kept = frozenset(named)
        folders = ("assets", "contributions", "optimizer", "weights")
        found = (path for name in folders for path in self._listed(self.root / name))
        return sorted(path for path in found if path.name.partition(".")[0] not in kept)

    def _listed(self, folder: Path) -> Iterator[Path]:
        return folder.iterdir() if folder.is_dir() else iter(())

    def _blob_path(self, kind: BlobKind, sha256: str) -> Path:
        return self.root / kind / f"{sha256}{_SUFFIX[kind]}"

    @contextmanager
    def _temporary(self, folder: Path) -> Iterator[Path]:
        """A name nobody else uses, gone afterwards whatever happens."""
        path = folder / f"{TEMPORARY}{os.getpid()}-{next(_COUNTER)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            yield path
        except OSError as error:
            raise _resource_error(folder, error) from error
        finally:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)


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


def _settle(path: Path, final: Path) -> None:
    """Make the file durable, then its name. A file of that name is replaced: it may be damaged."""
    _sync(path)
    path.replace(final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _resource_error(folder: Path, error: OSError) -> ResourceError:
    if error.errno in _NO_ROOM:
        return ResourceError(
            f"no room left for a policy in {folder}",
            hint="free some space and start the run again with --resume; nothing is lost",
        )
    return ResourceError(f"cannot write a policy in {folder}: {error.strerror or error}")
