"""Notes of weights that this machine has verified, so that no other process hashes them again.

A note has digest, size, mtime, inode and host, and is valid while they match; `PolicyStore.verify`
always reads the bytes. Concurrent processes wait for one that reads.
"""

from __future__ import annotations

import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.core.errors import PolicyError
from dora_pipe.core.system.clock import Clock, SystemClock
from dora_pipe.core.system.durable import write_atomically
from dora_pipe.store.safetensors_file import read_manifest

SUFFIX: Final = ".verified"

SETTLED_NS: Final = 100_000_000
"""Minimum ns between mtime and note: changes in one clock tick have the same mtime."""

OTHERS_S: Final = 300.0
"""Maximum wait for another process."""

POLL_S: Final = 0.02


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Verified file."""

    digest: str
    size: int
    mtime_ns: int
    inode: int
    host: str
    """Shared files may differ between machines."""


AGAIN: Final = (
    "a file of the store changed; `dora-pipe export policy RUN N DIR` makes version N again"
)


def need_digest(path: Path, digest: str) -> None:
    """Raises PolicyError for another weights digest."""
    digest_read = digest_of(path, digest)
    if digest_read != digest:
        raise PolicyError(f"{path} holds other weights ({digest_read[:12]}...)", hint=AGAIN)


def is_noted_as(path: Path, digest: str, clock: Clock) -> bool:
    """Return whether the digest matches. Raises ResourceError if unreadable."""
    try:
        return digest_of(path, digest, clock) == digest
    except PolicyError:
        return False


def digest_of(path: Path, digest: str, clock: Clock | None = None) -> str:
    """Return `digest` if a note confirms it, else that of the bytes.

    Raises PolicyError if not a safetensors file, ResourceError if unreadable.
    """
    if _is_noted(path, digest):
        return digest
    with one_at_a_time(path, clock or SystemClock()):
        if _is_noted(path, digest):
            return digest
        before = _note_of(path, digest)
        digest_read = read_manifest(path).digest
        if digest_read == digest and before is not None and before == _note_of(path, digest):
            _write(path, before)
    return digest_read


def settle(path: Path) -> None:
    """Set an unpublished file's mtime back, so that a note is valid at once and later changes are
    newer."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - SETTLED_NS))


def note_verified(path: Path, digest: str) -> None:
    """Write a note for a verified and settled file."""
    note = _note_of(path, digest)
    if note is not None:
        _write(path, note)


def unlink_noted(path: Path) -> None:
    """Delete a file and its note, if they exist."""
    path.unlink(missing_ok=True)
    note_path(path).unlink(missing_ok=True)


def note_path(path: Path) -> Path:
    """Return the path of a file's note."""
    return path.with_suffix(SUFFIX)


def _note_of(path: Path, digest: str) -> Note | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return Note(
        digest=digest,
        size=status.st_size,
        mtime_ns=status.st_mtime_ns,
        inode=status.st_ino,
        host=platform.node(),
    )


def _is_noted(path: Path, digest: str) -> bool:
    there = note_path(path)
    try:
        note = msgspec.json.decode(there.read_bytes(), type=Note)
        written_ns = there.stat().st_mtime_ns
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return False
    return note == _note_of(path, digest) and written_ns - note.mtime_ns >= SETTLED_NS


def _write(path: Path, note: Note) -> None:
    with suppress(OSError):
        write_atomically(note_path(path), msgspec.json.encode(note))


@contextmanager
def one_at_a_time(path: Path, clock: Clock) -> Iterator[None]:
    """Wait up to `OTHERS_S` for another process's lock, which its death releases."""
    try:
        file = path.open("rb")
    except OSError:
        yield  # the reader reports the problem
        return
    with file:
        give_up_ns = clock.now_ns() + int(OTHERS_S * 1e9)
        while clock.now_ns() < give_up_ns:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                clock.sleep(POLL_S)
            except OSError:
                break  # no lock support
            else:
                break
        yield
