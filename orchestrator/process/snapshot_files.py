"""Files of snapshots, written in a thread, so a slow disk does not delay rounds."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Never

import msgspec
import zstandard

import dora_pipe.orchestrator
import dora_pipe.schemas
from dora_pipe.core.loop.effect_runner import EffectRunner, Handler, unanswered
from dora_pipe.orchestrator.snapshots import Body, Snapshot, WriteSnapshot, state_of
from dora_pipe.schemas.wire import sha256_hex

LOG = logging.getLogger(__name__)

SNAPSHOTS_KEPT: Final = 2
"""One more in case the newest is damaged."""

SUFFIX: Final = ".snapshot"
FORMAT: Final = 2

BODY_BYTES_MAX: Final = 1 << 30
"""Maximum size to read; 10,000 workers with 64 requests each need a fifth."""

LEVEL: Final = 1
"""zstd level; files are rarely read."""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line of a snapshot."""

    format: int
    run: str
    source: str
    """Digest of the folding code."""
    offset: int
    """Offset of the last folded round."""
    digest: str
    body_sha256: str
    body_bytes: int

    @property
    def name(self) -> str:
        """File name, sorted by offset."""
        return f"{self.offset:020d}-{self.digest[:16]}{SUFFIX}"


_HEADER: Final = msgspec.json.Decoder(Header)
_ENCODER: Final = msgspec.json.Encoder()


def file_bytes(body: Body, *, run: str, offset: int, digest: str) -> tuple[str, bytes]:
    """Return a snapshot's file name and content."""
    content, size = sha256(), 0
    packer = zstandard.ZstdCompressor(level=LEVEL).compressobj()
    packed = []
    for piece in body.pieces():
        content.update(piece)
        size += len(piece)
        packed.append(packer.compress(piece))
    header = Header(
        format=FORMAT,
        run=run,
        source=source_digest(),
        offset=offset,
        digest=digest,
        body_sha256=content.hexdigest(),
        body_bytes=size,
    )
    head = _ENCODER.encode(header) + b"\n"
    return header.name, b"".join((head, *packed, packer.flush()))


def snapshots_in(folder: Path) -> list[Path]:
    """Return the files, newest first."""
    return sorted(folder.glob(f"*{SUFFIX}"), reverse=True)


def candidates(folder: Path, run: str) -> Iterator[Snapshot]:
    """Yield internally valid snapshots, newest first."""
    for path in snapshots_in(folder):
        try:
            yield _read(path, run)
        except (OSError, ValueError, zstandard.ZstdError) as error:
            LOG.warning("snapshot %s skipped: %s", path.name, error)


@cache
def source_digest() -> str:
    """Return the sha256 of the folding code."""
    digest = hashlib.sha256()
    for package in (dora_pipe.orchestrator, dora_pipe.schemas):
        assert package.__file__ is not None
        for path in sorted(Path(package.__file__).parent.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, run: str) -> Snapshot:
    line, _, packed = path.read_bytes().partition(b"\n")
    header = _HEADER.decode(line)
    if header.format != FORMAT or header.source != source_digest():
        raise ValueError("another version of this package wrote it")
    if header.run != run:
        raise ValueError(f"it is of run {header.run!r}")
    if header.body_bytes > BODY_BYTES_MAX:
        raise ValueError(f"it declares {header.body_bytes} bytes")
    body = _unpacked(packed, header.body_bytes)
    if len(body) != header.body_bytes or sha256_hex(body) != header.body_sha256:
        raise ValueError("it is incomplete or was changed")
    state = state_of(body)
    if state.digest() != header.digest:
        raise ValueError("the digest of its state differs")
    return Snapshot(state=state, offset=header.offset)


def _unpacked(packed: bytes, size: int) -> bytes:
    """Bound the size, whatever the frame declares."""
    stream: Any = zstandard.ZstdDecompressor().stream_reader(packed)
    return bytes(stream.read(size + 1))


CLOSE_S: Final = 5.0
"""Maximum wait when closing."""

WAITING_MAX: Final = 1
"""Waiting snapshots besides the running one."""

TEMPORARY: Final = ".tmp"


class SnapshotPort(EffectRunner[WriteSnapshot, Never]):
    """Skips snapshots while busy."""

    def __init__(self, folder: Path, run: str) -> None:
        def written(effect: WriteSnapshot) -> Iterable[Never]:
            write(folder, run, effect)
            return ()

        handler = Handler[WriteSnapshot, Never](WriteSnapshot, written, _left_out)
        super().__init__("snapshots", [handler], asked_max=WAITING_MAX, close_s=CLOSE_S)


def _left_out(effect: WriteSnapshot, error: Exception) -> Iterable[Never]:
    LOG.warning("no snapshot at decisions offset %d", effect.offset)
    return unanswered(effect, error)


def write(folder: Path, run: str, effect: WriteSnapshot) -> Path:
    """Write atomically and remove the oldest. Raises OSError."""
    name, content = file_bytes(effect.body, run=run, offset=effect.offset, digest=effect.digest)
    folder.mkdir(parents=True, exist_ok=True)
    partial, final = folder / f"{name}{TEMPORARY}", folder / name
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(final)
    for old in snapshots_in(folder)[SNAPSHOTS_KEPT:]:
        old.unlink(missing_ok=True)
    return final
