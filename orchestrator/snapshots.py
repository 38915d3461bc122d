"""Snapshots of the state, which shorten a restart.

A snapshot is a disposable cache: it is used only if run, code, bytes, digest and last round all
match the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Final, get_args, get_type_hints

import msgspec

from dora_pipe.core.errors import DoraError
from dora_pipe.orchestrator.digest import TABLES, Kind, Leaves
from dora_pipe.orchestrator.index import push, queue_key
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.rounds import STATE_DIGEST_EVERY, decode_round

SNAPSHOT_EVERY: Final = 16 * STATE_DIGEST_EVERY
"""About 100 s; such rounds carry the digest anyway."""

PIECE_LINES: Final = 512
"""Entities per piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State and its log position."""

    state: State
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Serialized state: an object line, then one line per entity.

    The digest has encoded the entities already, so a round only encodes the first line.
    """

    head: bytes
    lines: list[bytes] = field(default_factory=list)
    """From `Leaves.settled`."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces, to unblock the loop."""
        yield self.head
        for start in range(0, len(self.lines), PIECE_LINES):
            yield b"\n" + b"\n".join(self.lines[start : start + PIECE_LINES])


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
_ENCODER: Final = msgspec.json.Encoder()


def body_of(state: State) -> Body:
    """Return the state without derived fields."""
    head = _ENCODER.encode({name: getattr(state, name) for name in _SAVED})
    return Body(head=head, lines=state.leaves.settled(state))


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
        state.index.touch(worker)
    for group in state.groups.values():
        if group.spec.purpose == "train" and group.phase in ("generating", "scoring"):
            state.index.begin(group.spec)
        elif group.phase == "finished":
            state.finished.append(group.key)
    state.finished.sort()


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
