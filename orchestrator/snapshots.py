"""Snapshots of the state, which shorten a restart.

A snapshot is a disposable cache: it is used only if run, code, bytes, digest and last round all
match the log. A thread writes it, so a slow disk does not delay rounds.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
import zstandard

import dora_pipe.orchestrator
import dora_pipe.schemas
from dora_pipe.core.errors import DoraError
from dora_pipe.core.loop.effect_runner import EffectRunner, Handler, Handlers, unanswered
from dora_pipe.orchestrator.digest import TABLES, Kind, Leaves
from dora_pipe.orchestrator.index import push, queue_key
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.rounds import STATE_DIGEST_EVERY, decode_round
from dora_pipe.schemas.wire import sha256_hex

LOG = logging.getLogger(__name__)

SNAPSHOT_EVERY: Final = 16 * STATE_DIGEST_EVERY
"""About 100 s; such rounds carry the digest anyway."""

SNAPSHOTS_KEPT: Final = 2
"""One more in case the newest is damaged."""

SUFFIX: Final = ".snapshot"
FORMAT: Final = 2

BODY_BYTES_MAX: Final = 1 << 30
"""Maximum size to read; 10,000 workers with 64 requests each need a fifth."""

PIECE_BUCKETS: Final = 16
"""Buckets per piece."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State and its log position."""

    state: State
    offset: int

    @property
    def decisions_next(self) -> int:
        """Next position in decisions."""
        return self.offset + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Serialized state: an object line, then one line per entity.

    The digest has encoded the entities already, so a round only encodes the first line.
    """

    head: bytes
    buckets: list[dict[str, bytes]] = field(default_factory=list)
    """From `Leaves.settled`."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces, to unblock the loop."""
        yield self.head
        for start in range(0, len(self.buckets), PIECE_BUCKETS):
            buckets = self.buckets[start : start + PIECE_BUCKETS]
            if piece := b"\n".join(chain.from_iterable(map(_LINES, buckets))):
                yield b"\n" + piece

    def joined(self) -> bytes:
        return b"".join(self.pieces())


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSnapshot:
    """Effect: write a durable state; no event follows."""

    offset: int
    digest: str
    body: Body


_FOLLOWS: Final = frozenset({"index", "leaves", "queues", "finished", "weights"})
"""Derived fields."""

_SAVED: Final = tuple(
    field.name for field in fields(State) if field.name not in {*_FOLLOWS, *TABLES.values()}
)
_HINTS: Final = get_type_hints(State)
_HEAD: Final = msgspec.json.Decoder(
    msgspec.defstruct("Head", [(name, _HINTS[name]) for name in _SAVED], kw_only=True)
)
_LINE: Final = msgspec.json.Decoder(tuple[Kind, str, msgspec.Raw])
_ENTITY: Final = {
    kind: msgspec.json.Decoder(get_args(_HINTS[table])[1]) for kind, table in TABLES.items()
}
_HEADER: Final = msgspec.json.Decoder(Header)
_ENCODER: Final = msgspec.json.Encoder()
_LINES: Final = dict[str, bytes].values


def body_of(state: State) -> Body:
    """Return the state without derived fields."""
    head = _ENCODER.encode({name: getattr(state, name) for name in _SAVED})
    return Body(head=head, buckets=state.leaves.settled(state))


def state_of(body: bytes) -> State:
    """Decode a state. Raises msgspec.DecodeError, ValueError."""
    head, *lines = body.split(b"\n")
    decoded = _HEAD.decode(head)
    state = State(**{name: getattr(decoded, name) for name in _SAVED})
    for kind, name, value in sorted(_LINE.decode(line) for line in lines):
        getattr(state, TABLES[kind])[name] = _ENTITY[kind].decode(value)
    state.leaves = Leaves.of(state)
    try:
        _follow(state)
    except KeyError as error:
        raise ValueError(f"its state lacks {error}") from None
    return state


def _follow(state: State) -> None:
    for name, request in state.requests.items():
        if request.worker:
            state.workers[request.worker].requests.add(name)
        else:
            spec = state.groups[request.group].spec
            push(state.queues, state.queue_of(spec), queue_key(spec, request.sample))
    for worker in state.workers.values():
        state.index.mark(worker)
    for group in state.groups.values():
        if group.spec.purpose == "train" and group.phase in ("generating", "scoring"):
            state.index.begin(group.spec)
        elif group.phase == "finished":
            state.finished.append(group.key)
    state.finished.sort()


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


def fits_log(snapshot: Snapshot, value: bytes | None) -> str:
    """Return why `value`, the record at the snapshot's offset, does not match; empty if it does."""
    if value is None:
        return f"the log has no round at decisions offset {snapshot.offset}"
    try:
        round_ = decode_round(value)
    except DoraError as error:
        return f"decisions offset {snapshot.offset}: {error.message}"
    state = snapshot.state
    there = (round_.ordinal + 1, round_.control_next, round_.chain)
    if there != (state.rounds, state.control_next, state.chain):
        return f"the round at decisions offset {snapshot.offset} differs from the snapshot's round"
    return ""


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


class SnapshotPort:
    """`core.loop.runtime.Port` that skips snapshots while busy."""

    effects: tuple[type, ...] = (WriteSnapshot,)
    busy = False

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        handlers: Handlers = {WriteSnapshot: Handler(do=self._write, failed=_left_out)}
        self._runner = EffectRunner("snapshots", handlers, asked_max=WAITING_MAX)

    def start(self, effect: WriteSnapshot) -> None:
        """Start writing if idle."""
        self._runner.start(effect)

    def poll(self) -> list[Any]:
        """Return no events."""
        return self._runner.poll()

    def close(self) -> None:
        """Wait briefly for a running write; idempotent."""
        self._runner.close(wait_s=CLOSE_S)

    def _write(self, effect: WriteSnapshot) -> Iterator[Any]:
        write(self._folder, self._run, effect)
        yield from ()


def _left_out(effect: WriteSnapshot, error: Exception) -> Iterable[Any]:
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
