"""Where policies, checkpoints and contributions lie; it decides only how a file gets its name.

Everything is named by what it holds and appears at once: written under a temporary name, made
durable, named. Only a commit in the log names a file, so a file without a commit is an orphan:
harmless, and left alone until `dora-pipe prune`.

    <root>/weights/<weights digest>.safetensors, and a note beside it (`verified`)
    <root>/optimizer/<sha256>.safetensors
    <root>/contributions/<sha256>.arrow
    <root>/assets/<assets digest>/config.json, tokenizer files
    <root>/claims/<sha256>                  written by the log (`bus.claim_check`)

A store may lie elsewhere, on any file system that pyarrow knows (`store.url`); `root` is then a
bounded cache of it on this machine, and what is fetched is compared with its name. The copies used
longest ago leave it first; what was used within `KEEP_S` stays, whatever the bound says: another
process of this machine may be about to open it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from dora_pipe.config.storage import Store
from dora_pipe.core.clock import Clock, SystemClock
from dora_pipe.core.durable import sync
from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.store.files import CLAIMS, TEMPORARY, Files, Listed, LocalFiles, resource_error
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.verified import SUFFIX, note_path, note_verified

CACHE_BYTES_MAX: Final = 100 * 1024**3
"""Local copies beyond this are removed, unless the configuration says otherwise."""

KEEP_S: Final = 600.0
"""A copy used within this time is not removed."""

_CACHED: Final = ("contributions", "optimizer", "weights")
"""What is bounded; config and tokenizer files are small and stay."""

BlobKind = Literal["optimizer", "contributions"]

READ_BYTES: Final = 1 << 20
_SUFFIX: Final[dict[BlobKind, str]] = {"optimizer": ".safetensors", "contributions": ".arrow"}
_COUNTER = itertools.count()


class PolicyStore:
    """The policies of a run. Opening one creates nothing.

    The `..._path` methods say where a file lies on this machine, or would lie; `weights` and `blob`
    also fetch it where the store lies elsewhere.

    Example: ``PolicyStore(Path("runs/demo/policies")).weights(digest)``
    """

    def __init__(
        self,
        root: Path,
        remote: Files | None = None,
        *,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        clock: Clock | None = None,
        peers: Callable[[str, Path], bool] | None = None,
    ) -> None:
        """`peers` may write a file that `remote` has, by name, and says whether it did."""
        self.root = root
        self._files: Files = remote or LocalFiles(root)
        self._remote = remote is not None
        self._peers = peers or (lambda name, path: False)
        self._cache_bytes_max = cache_bytes_max
        self._clock = clock or SystemClock()

    @property
    def where(self) -> str:
        """Where the store lies, for people."""
        return self._files.where

    # Where things lie on this machine

    def weights_path(self, digest: str) -> Path:
        """Where the weights with this digest (hex) lie, or would lie."""
        return self.root / weights_name(digest)

    def assets_path(self, assets_digest: str) -> Path:
        """The directory of the config and tokenizer files with this digest."""
        return self.root / "assets" / assets_digest

    # Reading

    def has_weights(self, digest: str) -> bool:
        """Whether the store has a file of that name. Raises ResourceError."""
        return self._files.exists(weights_name(digest))

    def has_blob(self, kind: BlobKind, sha256: str) -> bool:
        """Whether the store has a file of that name. Raises ResourceError."""
        return self._files.exists(blob_name(kind, sha256))

    def weights(self, digest: str) -> Path:
        """The local path of weights, fetched and compared if need be.

        A local store is not read here: whoever loads weights compares them. Raises PolicyError for
        weights that are nowhere or other ones, ResourceError while the store is away.
        """
        path = self.weights_path(digest)
        if self._remote:
            name = weights_name(digest)
            if self._fetch(name, lambda at: read_manifest(at).digest == digest):
                note_verified(path, digest)
        return path

    def held_weights(self, digest: str) -> Path:
        """As `weights`, by a name that stays on this machine: for what is opened much later."""
        path = self.weights(digest)
        if not self._remote:
            return path
        held = self.root / "held" / path.name
        held.parent.mkdir(parents=True, exist_ok=True)
        if not held.exists():
            os.link(path, held)
        return held

    def verify(self, digest: str) -> Manifest:
        """Read weights from the disk and compare. Raises PolicyError if they are not these."""
        manifest = read_manifest(self.weights(digest))
        if manifest.digest != digest:
            raise PolicyError(
                f"{self.weights_path(digest)} holds other weights ({manifest.digest[:12]}...)",
                hint="a file of the store was changed; `dora-pipe replay` makes it again",
            )
        return manifest

    def blob(self, kind: BlobKind, sha256: str) -> Path:
        """The local path of a blob, fetched and compared if need be; see `weights`."""
        name = blob_name(kind, sha256)
        if self._remote:
            self._fetch(name, lambda at: file_sha256(at) == sha256)
        return self.root / name

    def verify_blob(self, kind: BlobKind, sha256: str) -> Path:
        """The path of a blob whose bytes were just checked. Raises PolicyError, ResourceError."""
        path = self.blob(kind, sha256)
        if not path.is_file():
            raise PolicyError(f"no {kind} file at {path}")
        if file_sha256(path) != sha256:
            raise PolicyError(f"{path} was changed: its sha256 is another one")
        return path

    def assets(self, digest: str) -> Path:
        """The local directory of config and tokenizer files, fetched and compared if need be.

        Raises PolicyError when they are nowhere, or not these.
        """
        final = self.assets_path(digest)
        if final.is_dir() or not self._remote:
            return final
        listed = self._files.listed(f"assets/{digest}")
        with self._temporary(final.parent) as path:
            path.mkdir()
            for one in listed:
                self._files.get(one.name, path / Path(one.name).name)
            if not listed or assets_digest(sorted(path.iterdir())) != digest:
                raise PolicyError(f"no config and tokenizer files {digest[:12]}... in {self.where}")
            _place(path, final)
        return final

    # Writing

    def publish_weights(self, write: Callable[[Path], Manifest]) -> Manifest:
        """Let `write` fill a file and give it the name of the manifest it returns.

        Raises ResourceError when there is no room; nothing is then left under any name.
        """
        with self._temporary(self.root / "weights") as path:
            manifest = write(path)
            self._publish(path, weights_name(manifest.digest))
        return manifest

    def publish_blob(self, kind: BlobKind, write: Callable[[Path], None]) -> Blob:
        """Let `write` fill a file and give it the name of its sha256. Raises ResourceError."""
        with self._temporary(self.root / kind) as path:
            write(path)
            blob = Blob(sha256=file_sha256(path), bytes=path.stat().st_size)
            self._publish(path, blob_name(kind, blob.sha256))
        return blob

    def publish_assets(self, files: Collection[Path]) -> str:
        """Copy config and tokenizer files; returns their digest. Raises ResourceError."""
        digest = assets_digest(files)
        final = self.assets_path(digest)
        if self._remote:
            for file in files:
                self._files.put(file, f"assets/{digest}/{file.name}")
        if final.is_dir():
            return digest
        with self._temporary(final.parent) as path:
            path.mkdir()
            for file in files:
                shutil.copyfile(file, path / file.name)
                sync(path / file.name)
            _place(path, final)
        return digest

    # Removing

    def drop_weights(self, digest: str) -> bool:
        """Delete weights here and in the store; whether the store had them. Raises ResourceError.

        Only the trainer after a commit and `prune` may do that (docs/storage.md).
        """
        return self._drop(weights_name(digest))

    def drop_blob(self, kind: BlobKind, sha256: str) -> bool:
        """Delete a blob here and in the store; whether the store had it. Raises ResourceError."""
        return self._drop(blob_name(kind, sha256))

    def everything(self) -> list[Listed]:
        """Every file of the store, unfinished ones among them; sorted. Notes of this machine are
        none. Raises ResourceError."""
        folders = ("assets", "contributions", "optimizer", "weights")
        found = (one for folder in folders for one in self._files.listed(folder))
        return [one for one in found if not one.name.endswith(SUFFIX)]

    def claims(self) -> list[Listed]:
        """Values too large for the log, which lie beside the policies. Raises ResourceError."""
        return self._files.listed(CLAIMS)

    def orphans(self, named: Collection[str]) -> list[Listed]:
        """Files whose digest is not in `named`, unfinished ones among them; sorted by name."""
        kept = frozenset(named)
        return [one for one in self.everything() if digest_in(one.name) not in kept]

    def remove(self, orphan: Listed) -> bool:
        """Delete a file of the store by its name. Raises ResourceError."""
        removed = self._drop(orphan.name)
        folder = (self.root / orphan.name).parent
        if folder.parent.name == "assets" and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        return removed

    def _drop(self, name: str) -> bool:
        found, here = self._files.delete(name), self.root / name
        if self._remote:
            here.unlink(missing_ok=True)
        note_path(here).unlink(missing_ok=True)
        return found

    def _publish(self, path: Path, name: str) -> None:
        """Make a finished file durable under its name; a remote store keeps a copy here."""
        self._files.put(path, name)
        if self._remote:
            path.replace(self.root / name)
            shrink(self.root, self._cache_bytes_max, self._clock)

    def _fetch(self, name: str, is_whole: Callable[[Path], bool]) -> bool:
        """Have a local copy of a file that is what its name says; whether it is fetched now.
        Raises PolicyError."""
        path = self.root / name
        if path.is_file():
            _touch(path, self._clock)
            return False
        with self._temporary(path.parent) as partial:
            if not (self._peers(name, partial) and _holds(is_whole, partial)):
                if not self._files.get(name, partial):
                    raise PolicyError(f"no {name} in {self.where}")
                if not is_whole(partial):
                    raise PolicyError(
                        f"{name} in {self.where} is not what its name says",
                        hint="a file of the store was changed; `dora-pipe replay` makes it again",
                    )
            partial.replace(path)
        shrink(self.root, self._cache_bytes_max, self._clock)
        return True

    @contextmanager
    def _temporary(self, folder: Path) -> Iterator[Path]:
        """A name nobody else uses, gone afterwards whatever happens."""
        path = folder / f"{TEMPORARY}{os.getpid()}-{next(_COUNTER)}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            yield path
        except OSError as error:
            raise resource_error(folder, error) from error
        finally:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)


def as_store(store: PolicyStore | Path) -> PolicyStore:
    """A store, or the local one in a directory."""
    return store if isinstance(store, PolicyStore) else PolicyStore(store)


def weights_name(digest: str) -> str:
    """The name of weights in a store."""
    return f"weights/{digest}.safetensors"


def blob_name(kind: BlobKind, sha256: str) -> str:
    """The name of a blob in a store."""
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


def _holds(is_whole: Callable[[Path], bool], path: Path) -> bool:
    """Whether a peer's file is what its name says; nobody vouches for a peer."""
    try:
        return is_whole(path)
    except PolicyError:
        return False


def _place(path: Path, final: Path) -> None:
    """Give a finished directory its name, unless somebody else just has."""
    sync(path)
    if not final.is_dir():
        path.replace(final)
    sync(final.parent)


def _touch(path: Path, clock: Clock) -> None:
    """Note that a copy is in use; its time of change stays."""
    os.utime(path, ns=(clock.wall_ns(), path.stat().st_mtime_ns))


def shrink(root: Path, bytes_max: int, clock: Clock) -> list[Path]:
    """Remove copies until the rest fits; which ones. Another process may do so at the same time."""
    found: list[tuple[int, int, Path]] = []
    for folder in _CACHED:
        for path in (root / folder).glob("*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix != SUFFIX:
                found.append((stat.st_atime_ns, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    youngest_ns = clock.wall_ns() - int(KEEP_S * 1e9)
    removed: list[Path] = []
    for used_ns, size, path in sorted(found):
        if total <= bytes_max or used_ns > youngest_ns:
            break
        path.unlink(missing_ok=True)
        note_path(path).unlink(missing_ok=True)
        removed.append(path)
        total -= size
    return removed


def open_store(
    root: Path,
    section: Store,
    *,
    run: str,
    clock: Clock | None = None,
    peers: Callable[[str, Path], bool] | None = None,
) -> PolicyStore:
    """The store of a run. `root` is its directory, or where copies of it lie if it is elsewhere.

    `peers` are asked before a store that lies elsewhere; see `PolicyStore`.
    Under an address every run has a folder of its own, so that none deletes files of another.
    Raises ConfigError for an address that cannot be used. Nothing is connected yet.
    """
    if not section.url:
        return PolicyStore(root, clock=clock)
    from dora_pipe.store.arrow_files import open_files

    remote = open_files(section.url, folder=run, clock=clock)
    bytes_max = int(section.cache_gb * 1e9)
    return PolicyStore(root, remote, cache_bytes_max=bytes_max, clock=clock, peers=peers)
