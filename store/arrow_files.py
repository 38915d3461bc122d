"""Files of the policy store on pyarrow file systems.

Uploads are renamed, except on object stores, where they are atomic.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

from pyarrow import fs

from dora_pipe.core.errors import ConfigError, ResourceError
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.core.system.durable import TEMPORARY, sync
from dora_pipe.store.files import Listed, is_no_room, no_room, resource_error

T = TypeVar("T")

LOG = logging.getLogger(__name__)

PIECE_BYTES: Final = 8 << 20
PAUSES_S: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses between retries."""

REFUSALS: Final = (
    "NO_SUCH_BUCKET",
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "INVALID_CLIENT_TOKEN_ID",
    "MISSING_AUTHENTICATION_TOKEN",
    "SIGNATURE_DOES_NOT_MATCH",
    "REQUEST_TIME_TOO_SKEWED",
    "HTTP status 401",
    "HTTP status 403",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
    "bucket does not exist",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "ContainerNotFound",
)
"""Error texts that a retry cannot fix."""

REFUSAL_NUMBERS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})

OBJECT_STORES: Final = frozenset({"s3", "gcs", "abfs"})
"""`type_name` of file systems with atomic uploads."""

_COUNTER = itertools.count()


class ArrowFiles:
    """`Files` on pyarrow."""

    def __init__(
        self, system: fs.FileSystem, base: str, *, where: str = "", clock: Clock | None = None
    ) -> None:
        self.where = where or base
        self._system = system
        self._base = base.rstrip("/")
        self._clock = clock or SystemClock()

    def put(self, source: Path, name: str) -> None:
        """Upload a file; `source` remains."""
        self._patiently(f"writing {name}", lambda: self._put(source, name))

    def get(self, name: str, target: Path) -> bool:
        return self._patiently(f"reading {name}", lambda: self._get(name, target))

    def exists(self, name: str) -> bool:
        return self._patiently(f"looking for {name}", lambda: self._bytes(name) is not None)

    def delete(self, name: str) -> bool:
        def remove() -> bool:
            if self._bytes(name) is None:
                return False
            self._system.delete_file(self._path(name))
            return True

        return self._patiently(f"removing {name}", remove)

    def listed(self, folder: str) -> list[Listed]:
        return self._patiently(f"listing {folder}", lambda: self._listed(folder))

    def _listed(self, folder: str) -> list[Listed]:
        selector = fs.FileSelector(self._path(folder), allow_not_found=True, recursive=True)
        infos = self._system.get_file_info(selector)
        # Some file systems list paths without a leading slash.
        base = self._base.lstrip("/")
        cut = len(base) + 1 if base else 0
        listed = [
            Listed(
                name=info.path.lstrip("/")[cut:], bytes=info.size, modified_ns=info.mtime_ns or 0
            )
            for info in infos
            if info.type == fs.FileType.File
        ]
        return sorted(listed, key=lambda file: file.name)

    def _put(self, source: Path, name: str) -> None:
        final = self._path(name)
        folder = final.rpartition("/")[0]
        if self._system.type_name in OBJECT_STORES:
            self._upload(source, final)
            return
        self._system.create_dir(folder, recursive=True)
        partial = f"{folder}/{TEMPORARY}{os.getpid()}-{next(_COUNTER)}"
        try:
            self._upload(source, partial)
            self._system.move(partial, final)
        except OSError:
            self._remove(partial)
            raise
        if self._system.type_name == "local":
            sync(Path(folder))

    def _upload(self, source: Path, path: str) -> None:
        """Copy and compare sizes: closing a failed stream may leave a partial file."""
        with source.open("rb") as file, self._system.open_output_stream(path) as stream:
            while piece := file.read(PIECE_BYTES):
                stream.write(piece)
        if self._system.type_name == "local":
            sync(Path(path))
        there, size = self._system.get_file_info(path).size, source.stat().st_size
        if there != size:
            self._remove(path)
            raise OSError(f"{there} of {size} bytes arrived")

    def _get(self, name: str, target: Path) -> bool:
        try:
            with (
                self._system.open_input_stream(self._path(name)) as stream,
                target.open("wb") as file,
            ):
                while piece := stream.read(PIECE_BYTES):
                    file.write(piece)
        except FileNotFoundError:
            target.unlink(missing_ok=True)
            return False
        return True

    def _bytes(self, name: str) -> int | None:
        info = self._system.get_file_info(self._path(name))
        return info.size if info.type == fs.FileType.File else None

    def _remove(self, path: str) -> None:
        try:
            self._system.delete_file(path)
        except OSError as error:
            LOG.debug("%s stays: %s", path, error)

    def _path(self, name: str) -> str:
        return f"{self._base}/{name}" if self._base else name

    def _patiently(self, what: str, call: Callable[[], T]) -> T:
        """Call with retries. Raises ResourceError; at once for refusals and NoRoom."""
        for pause_s in (*PAUSES_S, None):
            try:
                return call()
            except OSError as error:
                if is_no_room(error):
                    raise no_room(self.where) from error
                text = str(error)
                refused = error.errno in REFUSAL_NUMBERS or any(sign in text for sign in REFUSALS)
                if refused and self._system.type_name in OBJECT_STORES:
                    raise self._refused(what, error) from error
                if pause_s is None or refused:
                    if error.errno is not None and self._system.type_name == "local":
                        raise resource_error(Path(self.where), error) from error
                    raise ResourceError(
                        f"the policy store {self.where} does not answer: {what}: {_line(error)}",
                        hint="when it answers, continue with --resume; no data is lost",
                    ) from error
                LOG.warning(
                    "%s: %s: %s; trying again in %s s", self.where, what, _line(error), pause_s
                )
                self._clock.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def _refused(self, what: str, error: OSError) -> ResourceError:
        refused = ResourceError(
            f"the policy store {self.where} refuses: {what}: {_line(error)}",
            hint="check store.url (does the bucket exist?), this machine's credentials for it "
            "(e.g. AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY), and their rights",
        )
        refused.waited_out = True  # a restart would be refused too
        return refused


def open_files(url: str, *, folder: str = "", clock: Clock | None = None) -> ArrowFiles:
    """Open `s3://bucket/prefix?endpoint_override=...`, `file:///path` and other URLs.

    `folder` is a subdirectory. Raises ConfigError for an unknown URL or one with credentials.
    """
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "store.url must not hold credentials",
            hint="give them by the environment, e.g. AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    try:
        system, base = fs.FileSystem.from_uri(url)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"store.url {url}: {_line(error)}") from None
    if not base.strip("/"):
        raise ConfigError(f"store.url {url} has no bucket or folder")
    where = url.partition("?")[0].rstrip("/")
    if folder:
        base, where = f"{base.rstrip('/')}/{folder}", f"{where}/{folder}"
    return ArrowFiles(system, base, where=where, clock=clock)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
