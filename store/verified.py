"""Which files of weights this machine has compared with their digest; decides when that need not be
done again.

Several processes of a machine load the same version, and each would read and hash all of it. So who
has done that leaves a note beside the file: digest, size, time of change, inode, and the machine. A
note is believed while the file is as it says. What else may have become of it a note cannot know
(docs/storage.md): `PolicyStore.verify`, which audit asks, always reads the bytes.

Of processes that come at the same moment one reads, and the others wait for its note.
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

from dora_pipe.core.clock import Clock, SystemClock
from dora_pipe.core.errors import PolicyError
from dora_pipe.store.files import TEMPORARY
from dora_pipe.store.safetensors_file import read_manifest

SUFFIX: Final = ".verified"

SETTLED_NS: Final = 100_000_000
"""A file that changes twice within a tick of its file system's clock has one time of change: a note
that is not so much younger than the file says nothing."""

OTHERS_S: Final = 300.0
"""Another process may take so long to read the file, or to make it; then this one does so too."""

POLL_S: Final = 0.02


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared, and what it looked like."""

    digest: str
    size: int
    mtime_ns: int
    inode: int
    host: str
    """Another machine may have read other bytes of the same file."""


AGAIN: Final = (
    "a file of the store was changed; `dora-pipe export policy RUN N DIR` makes version N again"
)
"""What is to be done about it."""


def need_digest(path: Path, digest: str) -> None:
    """Raise PolicyError unless the file holds the weights of this digest."""
    found = digest_of(path, digest)
    if found != digest:
        raise PolicyError(f"{path} holds other weights ({found[:12]}...)", hint=AGAIN)


def is_noted_as(path: Path, digest: str, clock: Clock) -> bool:
    """As `need_digest`: whether it does. Raises ResourceError where it cannot be read."""
    try:
        return digest_of(path, digest, clock) == digest
    except PolicyError:
        return False


def digest_of(path: Path, digest: str, clock: Clock | None = None) -> str:
    """`digest` where the file is known to have it, else the digest of the bytes that are read.

    Raises PolicyError for what is no safetensors file, ResourceError where it cannot be read.
    """
    if _is_noted(path, digest):
        return digest
    with one_at_a_time(path, clock or SystemClock()):
        if _is_noted(path, digest):
            return digest
        before = _note_of(path, digest)
        found = read_manifest(path).digest
        if found == digest and before is not None and before == _note_of(path, digest):
            _write(path, before)
    return found


def settle(path: Path) -> None:
    """Set back when a file changed that is whole, under a name that nobody else knows: a note of it
    says something at once, for whatever changes it later gives it the time that it is then."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - SETTLED_NS))


def note_verified(path: Path, digest: str) -> None:
    """Leave a note of a file that the caller has just compared, and settled."""
    note = _note_of(path, digest)
    if note is not None:
        _write(path, note)


def unlink_noted(path: Path) -> None:
    """Delete a file with its note; neither need be there."""
    path.unlink(missing_ok=True)
    note_path(path).unlink(missing_ok=True)


def note_path(path: Path) -> Path:
    """Where the note of a file lies."""
    return path.with_suffix(SUFFIX)


def _note_of(path: Path, digest: str) -> Note | None:
    """What a note of the file as it is would say."""
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
    """Write a note whole or not at all; where that cannot be done, everybody reads."""
    final = note_path(path)
    partial = final.with_name(f"{TEMPORARY}{os.getpid()}-{final.name}")
    with suppress(OSError):
        partial.write_bytes(msgspec.json.encode(note))
        partial.replace(final)


@contextmanager
def one_at_a_time(path: Path, clock: Clock) -> Iterator[None]:
    """Wait while another process of this machine does so with the file, at most `OTHERS_S`; a lock
    dies with its process."""
    try:
        file = path.open("rb")
    except OSError:
        yield  # whoever reads it says what is wrong
        return
    with file:
        give_up_ns = clock.now_ns() + int(OTHERS_S * 1e9)
        while clock.now_ns() < give_up_ns:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                clock.sleep(POLL_S)
            except OSError:
                break  # a file system without locks
            else:
                break
        yield
