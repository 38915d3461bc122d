"""Incremental digest of a state.

    leaf(kind, id, value) = sha256(canonical JSON of [kind, id, value])
    digest                = sha256(sha256(canonical JSON of the rest), sum of the leaves mod 2^256)

Open groups, open requests, workers, multi-version entries and counted rows have leaves. The rest is
one object of the other fields. Sums are big-endian numbers of 32 bytes. Derived fields, constants
of the run and the chain are excluded.

Call `Leaves.touch` after each change of such an entity.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, ClassVar, Final, Literal, Protocol

from dora_pipe.config.logged import logged_keys
from dora_pipe.orchestrator.entities import Worker
from dora_pipe.schemas.batch import batch_lines
from dora_pipe.schemas.control import TakenGroup
from dora_pipe.schemas.wire import canonical

SHARE_BYTES: Final = 256 * 1024
"""Leaf bytes hashed per round, some milliseconds."""

LEAF_BYTES: Final = 256
"""Overhead per leaf."""

Kind = Literal["group", "request", "worker", "resident", "row"]

TABLES: Final[dict[Kind, str]] = {
    "group": "groups",
    "request": "requests",
    "worker": "workers",
    "resident": "residents",
    "row": "rows",
}
"""Fields of State with leaves, by kind."""

SUM_BYTES: Final = 32

_TABLE_OF: Final = {str(kind): table for kind, table in TABLES.items()}

LEFT_OUT: Final = frozenset(
    {"chain", "started", "index", "leaves", "queues", "finished", "weights", *TABLES.values()}
)
"""Fields of State without rest entry."""

PAIRS: Final = ("policies", "pins", "deadlines")
"""Maps with number keys, written as sorted pairs."""


class Digestible(Protocol):
    """State: a dataclass with the fields of `TABLES`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def rest_of(state: Digestible) -> dict[str, Any]:
    names = (name for name in state.__dataclass_fields__ if name not in LEFT_OUT)
    rest: dict[str, Any] = {name: getattr(state, name) for name in names}
    rest["config"] = rest["config"] and logged_keys(rest["config"])
    for name in PAIRS:
        rest[name] = sorted(rest[name].items())
    return rest


def digest_of(state: Digestible) -> str:
    """Return the hex digest computed from scratch."""
    return Leaves.of(state).digest(state)


class Leaves:
    """Bytes and hashes of a state's entities, as last settled.

    Snapshots reuse the bytes. Keys are strings `kind id`: the garbage collector does not track maps
    of strings to bytes.
    """

    def __init__(self) -> None:
        self._touched: dict[str, None] = {}
        self._bytes: dict[str, bytes] = {}
        self._sum = 0
        """Of the hashes of these bytes."""
        self._lines: dict[str, bytes] = {}
        """Digest lines of complete groups."""

    @classmethod
    def of(cls, state: Digestible) -> Leaves:
        """Return leaves that all need hashing."""
        leaves = cls()
        for kind, table in TABLES.items():
            for name in getattr(state, table):
                leaves.touch(kind, name)
        return leaves

    def __deepcopy__(self, memo: dict[int, Any]) -> Leaves:
        copied = Leaves()
        copied._touched = self._touched.copy()
        copied._bytes = self._bytes.copy()
        copied._sum = self._sum
        copied._lines = self._lines.copy()
        return copied

    def touch(self, kind: Kind, name: str) -> None:
        """Mark an added, changed or removed entity."""
        self._touched[f"{kind} {name}"] = None

    def complete(self, group: TakenGroup) -> None:
        """Prepare a complete group's digest lines; a whole batch takes longer than a round."""
        self._lines[group.group] = batch_lines(group)

    def batch_lines(self, group: TakenGroup) -> bytes:
        """Return the lines of a group that is taken."""
        return self._lines.pop(group.group, None) or batch_lines(group)

    def settle(self, state: Digestible, rounds: int = 0) -> None:
        """Hash touched leaves, oldest first: at least an equal share if `rounds` more rounds
        precede the digest."""
        least = -(-len(self._touched) // (rounds + 1))
        settled: list[str] = []
        spent = 0
        for key in self._touched:
            if len(settled) >= least and spent >= SHARE_BYTES:
                break
            spent += LEAF_BYTES + self._hash(state, key)
            settled.append(key)
        for key in settled:
            del self._touched[key]

    def digest(self, state: Digestible) -> str:
        """Return the hex digest of the state."""
        self.settle(state)
        rest = sha256(canonical(rest_of(state))).digest()
        total = self._sum % (1 << 8 * SUM_BYTES)
        return sha256(rest + total.to_bytes(SUM_BYTES)).hexdigest()

    def settled(self, state: Digestible) -> list[bytes]:
        """Return every leaf's canonical JSON."""
        self.settle(state)
        return list(self._bytes.values())

    def _hash(self, state: Digestible, key: str) -> int:
        kind, _, name = key.partition(" ")
        table = getattr(state, _TABLE_OF[kind])
        before = self._bytes.get(key)
        if before is not None:
            self._sum -= _number(before)
        if name not in table:
            self._bytes.pop(key, None)
            self._lines.pop(name, None)
            return 0
        value = table[name]
        leaf = canonical((kind, name, _alone(value) if kind == "worker" else value))
        self._bytes[key] = leaf
        self._sum += _number(leaf)
        return len(leaf)


def _number(leaf: bytes) -> int:
    return int.from_bytes(sha256(leaf).digest())


def _alone(worker: Worker) -> dict[str, Any]:
    return {name: getattr(worker, name) for name in worker.__struct_fields__ if name != "requests"}
