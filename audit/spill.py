"""A dictionary whose entries may be put away on a disk; it decides nothing.

Without a place to put them everything stays. With one, what was put away is fetched again when it
is asked for, and is live from then on: whoever reads cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

K = TypeVar("K")
Key = TypeVar("Key", contravariant=True)
V = TypeVar("V")


class Storage(Protocol[Key, V]):
    """Where entries of one kind are kept."""

    def keeps(self, key: Key) -> bool:
        """Whether an entry with such a key can be put away at all."""
        ...

    def fetch(self, key: Key) -> V | None:
        """The entry, if it was put away; it stays where it is until it is put away again."""
        ...

    def store(self, entries: Iterable[tuple[Key, V]]) -> None:
        """Keep these, instead of what was kept under their keys."""
        ...


class SpillDict(dict[K, V]):
    """Live entries are the dictionary's own: iterating, `values` and `len` see only those."""

    storage: Storage[K, V] | None = None
    on_fetch: Callable[[V], None] | None = None
    """Is told of every entry that is live again."""

    def __missing__(self, key: K) -> V:
        found = self._fetch(key)
        if found is None:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._fetch(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dictionary, with what was put away."""
        found: Any = dict.get(self, key)
        if found is None:
            found = self._fetch(key)
        return default if found is None else found

    def spill(self, keys: Iterable[K]) -> list[V]:
        """Let go of these live entries, if there is a place for them; those that have gone."""
        storage = self.storage
        if storage is None:
            return []
        gone = [(key, self[key]) for key in keys if dict.__contains__(self, key)]
        gone = [(key, entry) for key, entry in gone if storage.keeps(key)]
        storage.store(gone)
        for key, _ in gone:
            del self[key]
        return [entry for _, entry in gone]

    def _fetch(self, key: Any) -> V | None:
        if self.storage is None:
            return None
        found = self.storage.fetch(key)
        if found is not None:
            self[key] = found
            if self.on_fetch is not None:
                self.on_fetch(found)
        return found
