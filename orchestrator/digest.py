"""Decides what the digest of a state covers, and hashes only what has changed since the last one.

The formula, for whoever has a state (docs/reference/records.md says it with an example):

    leaf(kind, id, value) = sha256(canonical JSON of [kind, id, value])
    bucket(k)             = sha256(the leaves with crc32(id) mod BUCKETS == k, sorted, joined)
    digest                = sha256(sha256(canonical JSON of the rest), bucket(0), ..., bucket(4095))

A leaf is there for every open group, open request and worker, for what a worker holds that hosts
several versions at once, and for every row whose rewards are counted. The rest is one object of the
other fields: numbers, counters, short maps and lists. Every hash enters the next one as its 32
bytes.

Not covered is what follows from the covered (`index`, `queues`, `finished`, `weights`, the requests
of a worker), what no run changes (the frozen configuration and the planner's name, which `run
started` has), and the chain, which the log has anyway.

Rule: whoever changes one of those entities says so by `Leaves.touch`. A test and the simulator hold
the digest against one that was made from nothing.
"""

from __future__ import annotations

from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Literal
from zlib import crc32

from dora_pipe.config.logged import logged_keys
from dora_pipe.schemas.batch import batch_lines
from dora_pipe.schemas.wire import canonical

if TYPE_CHECKING:
    from dora_pipe.orchestrator.state import State, Worker
    from dora_pipe.schemas.control import TakenGroup

BUCKETS: Final = 4096
"""A bucket in which a leaf changed is hashed again: with few they are long, with many they are
many."""

SHARE_BYTES: Final = 256 * 1024
"""Leaves of so many bytes are hashed in any round, if there are so many: some milliseconds. A group
that has ended has ten times the bytes of a request."""

LEAF_BYTES: Final = 256
"""What a leaf costs beside its bytes, in bytes."""

NEAR_ROUNDS: Final = 16
"""Buckets are hashed in the last so many rounds before a digest: each changes again in every tenth
round of a busy run, and only what it holds in the end counts. Each of these rounds hashes those
that came with it, and its share of the others, so that the last one finds no more than any other.
"""

Kind = Literal["group", "request", "worker", "resident", "row"]

TABLES: Final[dict[Kind, str]] = {
    "group": "groups",
    "request": "requests",
    "worker": "workers",
    "resident": "residents",
    "row": "rows",
}
"""The fields of State whose entries have a leaf each, by the kind that the leaf says."""

_EMPTY: Final = sha256().digest()

_TABLE_OF: Final = {str(kind): table for kind, table in TABLES.items()}

LEFT_OUT: Final = frozenset(
    {"chain", "planner", "index", "leaves", "queues", "finished", "weights", *TABLES.values()}
)
"""The fields of State that are not in the rest."""

PAIRS: Final = ("policies", "pins", "deadlines")
"""Maps keyed by a number are written as sorted pairs: canonical JSON has no such maps."""


def bucket_of(name: str) -> int:
    """Where the leaf of an entity with this id lies."""
    return crc32(name.encode()) % BUCKETS


def rest_of(state: State) -> dict[str, Any]:
    names = (one for one in state.__dataclass_fields__ if one not in LEFT_OUT)
    rest: dict[str, Any] = {name: getattr(state, name) for name in names}
    rest["config"] = state.config and logged_keys(state.config)
    for name in PAIRS:
        rest[name] = sorted(rest[name].items())
    counters = rest.pop("counters")
    rest["tally"] = {name: getattr(counters, name) for name in counters.__dataclass_fields__}
    rest["tally"]["staleness"] = sorted(counters.staleness.items())
    return rest


def digest_of(state: State) -> str:
    """Form and hex digest of a state, made from nothing: what `State.digest` must say."""
    return Leaves.of(state).digest(state)


class Leaves:
    """The entities of one state as bytes and hashes, as they were when they were settled last.

    The bytes are kept because a snapshot is made of them (`orchestrator.snapshots`). Keys are one
    string each, `kind id`: maps of strings to bytes are not tracked by the garbage collector.
    """

    def __init__(self) -> None:
        self._touched: dict[str, None] = {}
        self._bytes: dict[int, dict[str, bytes]] = {}
        self._hashes: dict[int, dict[str, bytes]] = {}
        self._digests = [_EMPTY] * BUCKETS
        self._stale: dict[int, None] = {}
        """Buckets whose digest is not what they hold."""
        self._left = 0
        """Of `_stale`, when it was last settled."""
        self._lines: dict[str, bytes] = {}
        """Of complete groups, as a batch's digest has them."""
        self._lent: set[int] = set()
        """Buckets whose bytes a snapshot has: they are copied before they change."""

    @classmethod
    def of(cls, state: State) -> Leaves:
        """Those of a state that was not watched: all are to be hashed."""
        leaves = cls()
        for kind, table in TABLES.items():
            for name in getattr(state, table):
                leaves.touch(kind, name)
        return leaves

    def __deepcopy__(self, memo: dict[int, Any]) -> Leaves:
        """Bytes never change, so only what holds them is copied."""
        copied = Leaves()
        copied._touched = self._touched.copy()
        copied._bytes = {number: one.copy() for number, one in self._bytes.items()}
        copied._hashes = {number: one.copy() for number, one in self._hashes.items()}
        copied._digests = self._digests.copy()
        copied._stale = self._stale.copy()
        copied._lines = self._lines.copy()
        copied._left = self._left
        return copied

    def touch(self, kind: Kind, name: str) -> None:
        """An entity has come, has changed, or is gone."""
        self._touched[f"{kind} {name}"] = None

    def complete(self, group: TakenGroup) -> None:
        """A group waits for its batch. All lines of a batch together take longer than a round."""
        self._lines[group.group] = batch_lines(group)

    def batch_lines(self, group: TakenGroup) -> bytes:
        """The lines of a complete group, which is taken now."""
        return self._lines.pop(group.group, None) or batch_lines(group)

    @property
    def unsettled(self) -> int:
        """Leaves and buckets that the next digest has to hash."""
        return len(self._touched) + len(self._stale)

    def settle(self, state: State, rounds: int = 0) -> None:
        """Hash what was touched, and later the buckets that it lies in, the oldest first.

        With so many more rounds before the next digest: a share that leaves nothing over when it
        comes, and of the leaves no less than `SHARE_BYTES`, so that no round has to do it all.
        """
        near = rounds < NEAR_ROUNDS
        self._hash_some(state, _share(len(self._touched), rounds))
        if near:
            came = max(0, len(self._stale) - self._left)
            self._digest_some(came + _share(len(self._stale) - came, rounds))
        self._left = len(self._stale)

    def digest(self, state: State) -> str:
        """Return the hex digest of the state that these belong to."""
        self.settle(state)
        rest = sha256(canonical(rest_of(state))).digest()
        return sha256(rest + b"".join(self._digests)).hexdigest()

    def settled(self, state: State) -> list[dict[str, bytes]]:
        """The canonical JSON of every entity's leaf as it is now, by bucket.

        Nobody changes these maps any more: whoever has them may read them in another thread.
        """
        self.settle(state)
        self._lent = set(self._bytes)
        return list(self._bytes.values())

    def _hash_some(self, state: State, least: int) -> None:
        """So many of what was touched, and more up to `SHARE_BYTES`."""
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

    def _hash(self, state: State, key: str) -> int:
        """Hash one leaf, or forget it; its bytes."""
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
        """The leaves of a bucket, to be changed: those that a snapshot has stay as they are."""
        leaves = self._bytes.get(number)
        if leaves is None:
            leaves = self._bytes[number] = {}
        elif number in self._lent:
            self._lent.remove(number)
            leaves = self._bytes[number] = leaves.copy()
        return leaves


def _share(count: int, rounds: int) -> int:
    """An equal share of so many, for this round and so many more."""
    return -(-count // (rounds + 1))


def _alone(worker: Worker) -> dict[str, Any]:
    """A worker without its requests, which say themselves where they are: there may be many."""
    return {name: getattr(worker, name) for name in worker.__struct_fields__ if name != "requests"}
