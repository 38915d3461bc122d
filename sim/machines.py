"""Policy versions stored on each machine of a world.

With deltas every worker has separate copies, which outlive its incarnations; otherwise all roles
share the trainer's machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final

from dora_pipe.core.errors import InvariantBroken, PolicyError
from dora_pipe.core.system.clock import Clock
from dora_pipe.store.copies import MADE
from dora_pipe.store.delta import opened_delta
from dora_pipe.store.files import LocalFiles
from dora_pipe.store.store import CHAIN_MAX, PolicyStore
from dora_pipe.store.verified import SUFFIX

LOST_SHARE: Final = 0.7
HAD: Final = ("weights whole", "weights delta", "weights deltas")


class Machines:
    """Stores by role name."""

    def __init__(self, store: PolicyStore, folder: Path, clock: Clock, *, apart: bool) -> None:
        """`apart`: versions may be deltas."""
        self.counted: Counter[str] = Counter()
        self._store, self._folder, self._clock = store, folder, clock
        self._apart = apart
        self._of: dict[str, PolicyStore] = {}
        self._before: dict[str, str] = {}

    def of(self, worker: str) -> PolicyStore:
        """Return the store of a worker."""
        if not self._apart:
            return self._store
        if worker not in self._of:
            self._of[worker] = _Copies(self, self._store, self._folder / worker, self._clock)
        return self._of[worker]

    def can_be_had(self, digest: str) -> bool:
        """Report whether the store can produce a version."""
        for _ in range(CHAIN_MAX):
            if self._store.has_whole(digest):
                return True
            if not self._store.has_delta(digest):
                return False
            digest = self._made_of(digest)
        return False

    def lose(self, worker: str, chance: Random) -> bool:
        """Delete copies; report whether there were any."""
        folders = ("deltas", "weights") if worker in self._of else (MADE,)
        lost = [path for path in self._files(worker, folders) if chance.random() < LOST_SHARE]
        for path in lost:
            path.unlink()
        return bool(lost)

    def damage(self, worker: str, chance: Random) -> bool:
        """Flip a bit of a copy on a worker's machine, and delete versions rebuilt from deltas if
        it was one; report whether there was a copy."""
        copies = self._files(worker, ("deltas", "weights")) if worker in self._of else []
        if not copies:
            return False
        path = chance.choice(copies)
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(data)
        if path.parent.name == "deltas":
            for file in self._files(worker, ("weights",)):
                file.unlink()
        return True

    def _files(self, worker: str, folders: tuple[str, ...]) -> list[Path]:
        root = self._of.get(worker, self._store).root
        paths = (path for folder in folders for path in (root / folder).glob("*"))
        return sorted(path for path in paths if path.suffix != SUFFIX)

    def _made_of(self, digest: str) -> str:
        """Return the previous version; unique, since weights are a hash of their past."""
        if digest not in self._before:
            with opened_delta(self._store.delta(digest)) as delta:
                self._before[digest] = delta.before
        return self._before[digest]


class _Copies(PolicyStore):
    """Store copy that counts how versions are obtained."""

    def __init__(self, machines: Machines, store: PolicyStore, root: Path, clock: Clock) -> None:
        super().__init__(root, LocalFiles(store.root), clock=clock, with_deltas=True)
        self._machines = machines

    def weights(self, digest: str) -> Path:
        """Return the weights. Raises InvariantBroken if only the store has them."""
        try:
            return super().weights(digest)
        except PolicyError:
            if self._machines.can_be_had(digest):
                what = f"{self.root.name} cannot have weights {digest[:12]}, which the store has"
                raise InvariantBroken(f"kept: {what}") from None
            raise

    def whole(self, digest: str) -> Path:
        self._machines.counted[HAD[0]] += 1
        return super().whole(digest)

    def _chain(self, digest: str, here: Callable[[str], Path | None]) -> tuple[Path, list[Path]]:
        base, paths = super()._chain(digest, here)
        self._machines.counted[HAD[min(len(paths), 2)]] += 1
        return base, paths
