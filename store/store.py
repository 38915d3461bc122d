"""Policies, checkpoints and contributions, named by digest.

Files are written under a temporary name, synced, then renamed. Files without a commit in the log
are orphans for `dora-pipe prune`.

    <root>/weights/<weights digest>.safetensors, and a note (`verified`)
    <root>/deltas/<weights digest>.delta   makes that version from the one before it (`delta`)
    <root>/made/<weights digest>.safetensors    versions made from deltas, with notes
    <root>/optimizer/<sha256>.safetensors
    <root>/contributions/<sha256>.arrow
    <root>/assets/<assets digest>/config.json, tokenizer files
    <root>/blobs/<sha256>                  written by the log (`bus.blobs`)

With `store.url`, `root` is a bounded local cache (`copies`). A version is a full checkpoint, a
delta, or both; deltas are applied once per machine, and a full checkpoint replaces a damaged
delta. Damaged copies are fetched again; files of the store itself are never deleted for damage.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dora_pipe.config.section import FULL_EVERY_MAX
from dora_pipe.core.errors import PolicyError
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.core.system.durable import TEMPORARY, sync
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.store.copies import CACHED, MADE, place, shrink, touch
from dora_pipe.store.delta import (
    Change,
    opened_delta,
    opened_deltas,
    write_delta,
    write_from_deltas,
)
from dora_pipe.store.files import BLOBS, Files, Listed, LocalFiles, resource_error
from dora_pipe.store.names import (
    BlobKind,
    assets_digest,
    blob_name,
    delta_name,
    digest_in,
    file_sha256,
    is_weights,
    makes_version,
    weights_name,
)
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.verified import (
    AGAIN,
    SUFFIX,
    is_noted_as,
    need_digest,
    note_verified,
    one_at_a_time,
    settle,
    unlink_noted,
)

LOG = logging.getLogger(__name__)

CACHE_BYTES_MAX: Final = 100 * 1024**3
CHAIN_MAX: Final = 2 * FULL_EVERY_MAX
"""Maximum deltas after a full checkpoint: twice the configurable maximum, which may change. Each
is an open file."""

FETCHES_MAX: Final = 2
"""Attempts to fetch a file with a wrong digest."""
_COUNTER = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """Result of publishing a version."""

    manifest: Manifest
    whole: bool = True
    delta: Blob | None = None
    change: Change | None = None


class PolicyStore:
    """Store of a run's policies; opening it creates nothing.

    The `..._path` methods do not download. Example:
    ``PolicyStore(Path("runs/demo/policies")).weights(digest)``
    """

    def __init__(
        self,
        root: Path,
        remote: Files | None = None,
        *,
        cache_bytes_max: int = CACHE_BYTES_MAX,
        clock: Clock | None = None,
        peers: Callable[[str, Path], bool] | None = None,
        with_deltas: bool | None = False,
    ) -> None:
        """Create a store.

        `peers` may write a file of `remote` and returns whether it did. `with_deltas`: whether to
        look for deltas first; None: if one exists.
        """
        self.root = root
        self._files: Files = remote or LocalFiles(root)
        self._remote = remote is not None
        self._with_deltas = with_deltas
        self._peers = peers or (lambda name, path: False)
        self._cache_bytes_max = cache_bytes_max
        self._clock = clock or SystemClock()

    @property
    def where(self) -> str:
        return self._files.where

    # Local paths

    def weights_path(self, digest: str) -> Path:
        """Return the local path, existing or not."""
        return self.root / weights_name(digest)

    def assets_path(self, assets_digest: str) -> Path:
        """Return the directory of config and tokenizer files."""
        return self.root / "assets" / assets_digest

    # Reading

    def has_weights(self, digest: str) -> bool:
        """Return whether weights exist, full or as a delta. Raises ResourceError."""
        return self.has_whole(digest) or self.has_delta(digest)

    def has_whole(self, digest: str) -> bool:
        return self._files.exists(weights_name(digest))

    def has_delta(self, digest: str) -> bool:
        return self._files.exists(delta_name(digest))

    def has_blob(self, kind: BlobKind, sha256: str) -> bool:
        return self._files.exists(blob_name(kind, sha256))

    def weights(self, digest: str) -> Path:
        """Return the local path of weights, fetched or made, verified once per machine.

        Raises PolicyError for missing or wrong weights, ResourceError if the store is unreachable.
        """
        if (here := self._verified_copy(digest)) is not None:
            return here
        if self._remote:
            return self._from_elsewhere(digest)
        if not self.has_delta(digest):
            return self._sound(digest)
        if (path := self.weights_path(digest)).is_file():
            _warn(digest, PolicyError(f"{path} does not match its name"), delta_name(digest))
        return self._made(digest)

    def held_weights(self, digest: str) -> Path:
        """Return `weights` under a path that is never evicted."""
        path = self.weights(digest)
        if not self._remote and path == self.weights_path(digest):
            return path
        held = self.root / "held" / path.name
        held.parent.mkdir(parents=True, exist_ok=True)
        if not (held.exists() and held.samefile(path)):
            held.unlink(missing_ok=True)
            os.link(path, held)
        return held

    def verify(self, digest: str) -> Manifest:
        """Read and compare weights, replacing a damaged copy. Raises PolicyError."""
        for _ in range(FETCHES_MAX):
            path = self.weights(digest)
            manifest = read_manifest(path)
            if manifest.digest == digest:
                return manifest
            if not self._is_copy(path):
                break
            self._forget(path)
        raise PolicyError(f"{path} holds other weights ({manifest.digest[:12]}...)", hint=AGAIN)

    def delta(self, digest: str) -> Path:
        """Return a delta's verified local path. Raises PolicyError, ResourceError."""
        name = delta_name(digest)
        path = self.root / name
        if self._remote:
            is_whole = partial(makes_version, digest=digest)
            if not (self._fetch(name, is_whole) or is_whole(path)):
                self._forget(path)
                self._fetch(name, is_whole)
        return path

    def whole(self, digest: str) -> Path:
        """Return `weights` from the full checkpoint."""
        path = self.weights_path(digest)
        if self._remote:
            name = weights_name(digest)
            if self._fetch(name, partial(is_weights, digest=digest)):
                note_verified(path, digest)
        return path

    def make(self, digest: str, path: Path, here: Callable[[str], Path | None]) -> Manifest:
        """Write and verify a version from the store's deltas.

        Starts at the nearest version that `here` returns or that has a full checkpoint. Raises
        PolicyError.
        """
        base, paths = self._chain(digest, here)
        with opened_deltas(paths) as deltas:
            manifest = write_from_deltas(path, base, deltas)
        LOG.info("version %s... was made of %s and %d deltas", digest[:12], base, len(paths))
        return manifest

    def _verified_copy(self, digest: str) -> Path | None:
        """Return the file of a version on this machine; forget a damaged one."""
        path, copy = self.weights_path(digest), self._made_path(digest)
        if copy.is_file():
            if is_noted_as(copy, digest, self._clock):
                touch(copy, self._clock)
                return copy
            self._forget(copy)
        return path if path.is_file() and is_noted_as(path, digest, self._clock) else None

    def _is_copy(self, path: Path) -> bool:
        return self._remote or path.parent.name == MADE

    def _forget(self, path: Path) -> None:
        LOG.warning("%s was damaged on this machine; reading it again", path)
        unlink_noted(path)

    def _sound(self, digest: str) -> Path:
        path = self.whole(digest)
        need_digest(path, digest)
        return path

    def _made_path(self, digest: str) -> Path:
        path = self.weights_path(digest)
        return path if self._remote else self.root / MADE / path.name

    def _from_elsewhere(self, digest: str) -> Path:
        """Try the run's usual format first, then the other."""
        with_deltas = self.has_delta(digest) if self._with_deltas is None else self._with_deltas
        ways = (self._made, self.has_delta, delta_name), (self.whole, self.has_whole, weights_name)
        (first, *_), (other, has_other, named) = ways if with_deltas else ways[::-1]
        try:
            return first(digest)
        except PolicyError as error:
            if not has_other(digest):
                raise
            _warn(digest, error, named(digest))
        return other(digest)

    def _made(self, digest: str) -> Path:
        """Apply deltas to the nearest local version or full checkpoint.

        If a remote full checkpoint exists, use only the version directly before.
        """
        there = self.delta(digest)
        with opened_delta(there) as delta:
            alone = self._remote and self._verified_copy(delta.before) is None
            if alone and (held := self._whole_or_none(digest)) is not None:
                return held
        final = self._made_path(digest)
        with one_at_a_time(there, self._clock):
            if (here := self._verified_copy(digest)) is not None:
                return here  # another process made it
            with self._temporary(final.parent) as path:
                self._make_here(digest, path)
                settle(path)
                self._keep_copy(path, final)
        note_verified(final, digest)
        return final

    def _make_here(self, digest: str, path: Path) -> None:
        """Run `make`; retry once without a changed source."""
        bases: list[Path] = []

        def here(name: str) -> Path | None:
            base = self._verified_copy(name)
            bases[:] = [base] if base is not None else []
            return base

        try:
            self.make(digest, path, here)
        except PolicyError:
            if not (bases and self._is_copy(bases[0])) or is_weights(bases[0], bases[0].stem):
                raise
            self._forget(bases[0])
            self.make(digest, path, self._verified_copy)

    def _whole_or_none(self, digest: str) -> Path | None:
        if not self.has_whole(digest):
            return None
        try:
            return self._sound(digest)
        except PolicyError as error:
            if not self.has_delta(digest):
                raise
            _warn(digest, error, delta_name(digest))
        return None

    def _chain(self, digest: str, here: Callable[[str], Path | None]) -> tuple[Path, list[Path]]:
        paths: list[Path] = []
        version = digest
        for _ in range(CHAIN_MAX):
            path = self.delta(version)
            with opened_delta(path) as delta:
                if delta.after != version:
                    raise PolicyError(f"{path} produces another version", hint=AGAIN)
                version = delta.before
            paths.insert(0, path)
            base = here(version) or self._whole_or_none(version)
            if base is not None:
                return base, paths
        raise PolicyError(f"{delta_name(digest)}: more than {CHAIN_MAX} deltas", hint=AGAIN)

    def _keep_copy(self, path: Path, final: Path) -> None:
        sync(path)
        path.replace(final)
        shrink(self.root, self._cache_bytes_max, self._clock, CACHED if self._remote else (MADE,))

    def blob(self, kind: BlobKind, sha256: str) -> Path:
        """Return the verified local path of a blob."""
        name = blob_name(kind, sha256)
        if self._remote:
            self._fetch(name, lambda path: file_sha256(path) == sha256)
        return self.root / name

    def verify_blob(self, kind: BlobKind, sha256: str) -> Path:
        """Return a blob's path after verifying its bytes. Raises PolicyError, ResourceError."""
        path = self.blob(kind, sha256)
        if not path.is_file():
            raise PolicyError(f"no {kind} file at {path}")
        if self._remote and file_sha256(path) != sha256:
            self._forget(path)
            path = self.blob(kind, sha256)
        if file_sha256(path) != sha256:
            raise PolicyError(f"{path} was changed: its sha256 differs")
        return path

    def assets(self, digest: str) -> Path:
        """Return the verified directory of config and tokenizer files. Raises PolicyError."""
        final = self.assets_path(digest)
        if not self._remote:
            return final
        if final.is_dir():
            if assets_digest(sorted(final.iterdir())) == digest:
                return final
            LOG.warning("%s was damaged on this machine; reading it again", final)
            shutil.rmtree(final, ignore_errors=True)
        listed = self._files.listed(f"assets/{digest}")
        with self._temporary(final.parent) as path:
            path.mkdir()
            for file in listed:
                self._files.get(file.name, path / Path(file.name).name)
            if not listed or assets_digest(sorted(path.iterdir())) != digest:
                raise PolicyError(f"no config and tokenizer files {digest[:12]}... in {self.where}")
            place(path, final)
        return final

    # Writing

    def publish_weights(self, write: Callable[[Path], Manifest]) -> Manifest:
        """Write and publish weights. Raises ResourceError, leaving no file."""
        return self.publish_version(write, before="", whole=True).manifest

    def publish_version(
        self, write: Callable[[Path], Manifest], *, before: str, whole: bool
    ) -> PublishedVersion:
        """Publish weights, and a delta from `before`; without `whole` only the delta, if possible.

        No delta is possible without changes, without `before`, or if the store makes this version
        from another one (a cycle). Raises ResourceError; files published until then are harmless.
        """
        with self._temporary(self.root / "weights") as path:
            manifest = write(path)
            published = self._publish_delta(path, manifest.digest, before)
            if whole or published is None:
                self._publish(path, weights_name(manifest.digest))
            else:
                final = self._made_path(manifest.digest)
                final.parent.mkdir(parents=True, exist_ok=True)
                self._keep_copy(path, final)
        delta, change = published or (None, None)
        return PublishedVersion(
            manifest=manifest, whole=whole or delta is None, delta=delta, change=change
        )

    def _publish_delta(self, after: Path, digest: str, before: str) -> tuple[Blob, Change] | None:
        try:
            if before in ("", digest) or self._delta_base(digest) not in (None, before):
                return None
            self.verify(before)  # Damage in it would enter all later versions.
            base = self.weights(before)
            with self._temporary(self.root / "deltas") as path:
                change = write_delta(path, base, after, digest_before=before, digest_after=digest)
                blob = Blob(sha256=file_sha256(path), bytes=path.stat().st_size)
                self._publish(path, delta_name(digest))
        except PolicyError as error:
            LOG.warning("version %s... is stored whole: %s", digest[:12], error.message)
            return None
        return blob, change

    def _delta_base(self, digest: str) -> str | None:
        if not self.has_delta(digest):
            return None
        with opened_delta(self.delta(digest)) as delta:
            return delta.before

    def mend(self, digest: str) -> bool:
        """Replace a damaged remote full checkpoint; return whether there was one. Raises
        PolicyError, ResourceError."""
        if not (self._remote and self.has_weights(digest)):
            return False
        name, is_it = weights_name(digest), partial(is_weights, digest=digest)
        if not self.has_whole(digest):
            name, is_it = delta_name(digest), partial(makes_version, digest=digest)
        with self._temporary(self.root / "weights") as path:
            if self._files.get(name, path) and is_it(path):
                return False
            self.verify(digest)
            shutil.copyfile(self.weights(digest), path)
            self._files.put(path, weights_name(digest))
        LOG.warning("%s in %s was damaged; the full version is restored", name, self.where)
        return True

    def publish_blob(self, kind: BlobKind, write: Callable[[Path], object]) -> Blob:
        """Write and publish a blob. Raises ResourceError."""
        with self._temporary(self.root / kind) as path:
            write(path)
            blob = Blob(sha256=file_sha256(path), bytes=path.stat().st_size)
            self._publish(path, blob_name(kind, blob.sha256))
        return blob

    def publish_assets(self, files: Collection[Path]) -> str:
        """Copy config and tokenizer files; return their digest. Raises ResourceError."""
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
            place(path, final)
        return digest

    # Removing

    def drop_weights(self, digest: str) -> bool:
        """Delete a full checkpoint; return whether it existed. Raises ResourceError.

        Only the trainer after a commit and `prune` may call it (docs/storage.md).
        """
        unlink_noted(self._made_path(digest))
        return self._drop(weights_name(digest))

    def drop_delta(self, digest: str) -> bool:
        """Delete a delta; return whether it existed. Raises ResourceError."""
        return self._drop(delta_name(digest))

    def drop_blob(self, kind: BlobKind, sha256: str) -> bool:
        """Delete a blob; return whether it existed. Raises ResourceError."""
        return self._drop(blob_name(kind, sha256))

    def everything(self) -> list[Listed]:
        """Return all files but notes, sorted, including unfinished ones. Raises ResourceError."""
        folders = ("assets", "change", "contributions", MADE, "optimizer", "deltas", "weights")
        listed = (file for folder in folders for file in self._files.listed(folder))
        return [file for file in listed if not file.name.endswith(SUFFIX)]

    def blobs(self) -> list[Listed]:
        """Return the log's large values. Raises ResourceError."""
        return self._files.listed(BLOBS)

    def orphans(self, named: Collection[str]) -> list[Listed]:
        """Return sorted files whose digest is not in `named`, including unfinished ones."""
        kept = frozenset(named)
        return [file for file in self.everything() if digest_in(file.name) not in kept]

    def remove(self, orphan: Listed) -> bool:
        removed = self._drop(orphan.name)
        folder = (self.root / orphan.name).parent
        if folder.parent.name == "assets" and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        return removed

    def _drop(self, name: str) -> bool:
        deleted = self._files.delete(name)
        unlink_noted(self.root / name)
        return deleted

    def _publish(self, path: Path, name: str) -> None:
        self._files.put(path, name)
        if self._remote:
            path.replace(self.root / name)
            shrink(self.root, self._cache_bytes_max, self._clock)

    def _fetch(self, name: str, is_whole: Callable[[Path], bool]) -> bool:
        """Ensure a valid local copy; return whether it was fetched now. Raises PolicyError."""
        path = self.root / name
        if path.is_file():
            touch(path, self._clock)
            return False
        with self._temporary(path.parent) as partial:
            if not (self._peers(name, partial) and is_whole(partial)):
                self._get(name, partial, is_whole)
            settle(partial)
            partial.replace(path)
        shrink(self.root, self._cache_bytes_max, self._clock)
        return True

    def _get(self, name: str, target: Path, is_whole: Callable[[Path], bool]) -> None:
        for _ in range(FETCHES_MAX):
            if not self._files.get(name, target):
                raise PolicyError(f"no {name} in {self.where}")
            if is_whole(target):
                return
            LOG.warning("%s from %s has another digest", name, self.where)
        raise PolicyError(f"{name} in {self.where} does not match its name", hint=AGAIN)

    @contextmanager
    def _temporary(self, folder: Path) -> Iterator[Path]:
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


def _warn(digest: str, error: PolicyError, taken: str) -> None:
    LOG.warning("version %s...: %s; %s is taken", digest[:12], error.message, taken)


def as_store(store: PolicyStore | Path) -> PolicyStore:
    """Return the store, or open the local one in a directory."""
    return store if isinstance(store, PolicyStore) else PolicyStore(store)
