"""Incremental digest of a state.

    leaf(kind, id, value) = sha256(canonical JSON of [kind, id, value])
    bucket(k)             = sha256(the leaves with crc32(id) mod BUCKETS == k, sorted, joined)
    digest                = sha256(sha256(canonical JSON of the rest), bucket(0), ..., bucket(4095))

Open groups, open requests, workers, multi-version entries and counted rows have leaves. The rest is
one object of the other fields. Hashes are joined as 32 raw bytes. Derived fields, constants of the
run and the chain are excluded.

Call `Leaves.touch` after each change of such an entity.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import islice
from typing import Any, ClassVar, Final, Literal, Protocol
from zlib import crc32

from dora_pipe.config.logged import logged_keys
from dora_pipe.orchestrator.entities import Worker
from dora_pipe.schemas.batch import batch_lines
from dora_pipe.schemas.control import TakenGroup
from dora_pipe.schemas.wire import canonical

BUCKETS: Final = 4096
"""A change rehashes its whole bucket."""

SHARE_BYTES: Final = 256 * 1024
"""Leaf bytes hashed per round, some milliseconds."""

LEAF_BYTES: Final = 256
"""Overhead per leaf."""

NEAR_ROUNDS: Final = 16
"""Rounds before a digest in which buckets are hashed in equal shares; busy buckets change every
tenth round."""

Kind = Literal["group", "request", "worker", "resident", "row"]

TABLES: Final[dict[Kind, str]] = {
    "group": "groups",
    "request": "requests",
    "worker": "workers",
    "resident": "residents",
    "row": "rows",
}
"""Fields of State with leaves, by kind."""

_EMPTY: Final = sha256().digest()

_TABLE_OF: Final = {str(kind): table for kind, table in TABLES.items()}

LEFT_OUT: Final = frozenset(
    {"chain", "planner", "index", "leaves", "queues", "finished", "weights", *TABLES.values()}
)
"""Fields of State without rest entry."""

PAIRS: Final = ("policies", "pins", "deadlines")
"""Maps with number keys, written as sorted pairs."""


class Digestible(Protocol):
    """State: a dataclass with the fields of `TABLES`."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


def bucket_of(name: str) -> int:
    """Return the bucket of an entity id."""
    return crc32(name.encode()) % BUCKETS


def rest_of(state: Digestible) -> dict[str, Any]:
    names = (name for name in state.__dataclass_fields__ if name not in LEFT_OUT)
    rest: dict[str, Any] = {name: getattr(state, name) for name in names}
    rest["config"] = rest["config"] and logged_keys(rest["config"])
    for name in PAIRS:
        rest[name] = sorted(rest[name].items())
    counters = rest.pop("counters")
    rest["tally"] = {name: getattr(counters, name) for name in counters.__dataclass_fields__}
    rest["tally"]["staleness"] = sorted(counters.staleness.items())
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
        self._bytes: dict[int, dict[str, bytes]] = {}
        self._hashes: dict[int, dict[str, bytes]] = {}
        self._digests = [_EMPTY] * BUCKETS
        self._stale: dict[int, None] = {}
        """Buckets to rehash."""
        self._left = 0
        """Size of `_stale` after the last settling."""
        self._lines: dict[str, bytes] = {}
        """Digest lines of complete groups."""
        self._lent: set[int] = set()
        """Buckets shared with a snapshot; copied on write."""

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
        copied._bytes = {number: bucket.copy() for number, bucket in self._bytes.items()}
        copied._hashes = {number: bucket.copy() for number, bucket in self._hashes.items()}
        copied._digests = self._digests.copy()
        copied._stale = self._stale.copy()
        copied._lines = self._lines.copy()
        copied._left = self._left
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

    @property
    def unsettled(self) -> int:
        """Return the number of leaves and buckets to hash."""
        return len(self._touched) + len(self._stale)

    def settle(self, state: Digestible, rounds: int = 0) -> None:
        """Hash touched leaves, then buckets, oldest first: one equal share if `rounds` more
        rounds precede the digest."""
        near = rounds < NEAR_ROUNDS
        self._hash_some(state, _share(len(self._touched), rounds))
        if near:
            came = max(0, len(self._stale) - self._left)
            self._digest_some(came + _share(len(self._stale) - came, rounds))
        self._left = len(self._stale)

    def digest(self, state: Digestible) -> str:
        """Return the hex digest of the state."""
        self.settle(state)
        rest = sha256(canonical(rest_of(state))).digest()
        return sha256(rest + b"".join(self._digests)).hexdigest()

    def settled(self, state: Digestible) -> list[dict[str, bytes]]:
        """Return every leaf's canonical JSON, by bucket; safe to read in another thread."""
        self.settle(state)
        self._lent = set(self._bytes)
        return list(self._bytes.values())

    def _hash_some(self, state: Digestible, least: int) -> None:
        done: list[str] = []
        spent = 0
        for key in self._touched:
            if len(done) >= least and spent >= SHARE_BYTES:
                break
            spent += LEAF_BYTES + self._hash(state, key)
            done.append(key)
        for key in done:
            del self._touched[key]

    def _digest_some(self, count: int) -> None:
        for number in list(islice(self._stale, count)):
            del self._stale[number]
            leaves = sorted(self._hashes[number].values())
            self._digests[number] = sha256(b"".join(leaves)).digest()

    def _hash(self, state: Digestible, key: str) -> int:
        kind, _, name = key.partition(" ")
        table = getattr(state, _TABLE_OF[kind])
        number = bucket_of(name)
        self._stale[number] = None
        hashes, leaves = self._hashes.setdefault(number, {}), self._own(number)
        if name not in table:
            hashes.pop(key, None)
            leaves.pop(key, None)
            self._lines.pop(name, None)
            return 0
        value = table[name]
        raw = canonical((kind, name, _alone(value) if kind == "worker" else value))
        leaves[key] = raw
        hashes[key] = sha256(raw).digest()
        return len(raw)

    def _own(self, number: int) -> dict[str, bytes]:
        leaves = self._bytes.get(number)
        if leaves is None:
            leaves = self._bytes[number] = {}
        elif number in self._lent:
            self._lent.remove(number)
            leaves = self._bytes[number] = leaves.copy()
        return leaves


def _share(count: int, rounds: int) -> int:
    return -(-count // (rounds + 1))


def _alone(worker: Worker) -> dict[str, Any]:
    return {name: getattr(worker, name) for name in worker.__struct_fields__ if name != "requests"}
