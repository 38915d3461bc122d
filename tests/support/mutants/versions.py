"""Mutants of the policy store; see `rules`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dora_pipe.consumers.trainer.commits import retained, underlying
from dora_pipe.core.errors import PolicyError
from dora_pipe.orchestrator.apply_decision import pinned
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.store import store as stores
from dora_pipe.store.delta import Delta, write_from_deltas
from dora_pipe.store.names import delta_name
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore

if TYPE_CHECKING:
    from tests.support.mutants.rules import Patches


def _pins_forgotten(patches: Patches) -> None:
    def without_pins(commits: Sequence[Blob | None], pins: Any, keep_every: int) -> set[int]:
        return retained(commits, (len(commits),), keep_every)

    patches.everywhere(retained, without_pins)


def _served_not_pinned(patches: Patches) -> None:
    patches.everywhere(pinned, lambda state: tuple(sorted(state.pins)))


def _base_dropped(patches: Patches) -> None:
    patches.everywhere(underlying, lambda history, versions: set(versions))


def _any_base(patches: Patches) -> None:
    right = PolicyStore._chain

    def chain(
        self: PolicyStore, digest: str, here: Callable[[str], Path | None]
    ) -> tuple[Path, list[Path]]:
        copies = sorted((self.root / "weights").glob("*.safetensors")) if self._remote else []
        return (copies[-1], [self.delta(digest)]) if copies else right(self, digest, here)

    def written(path: Path, base: Path, deltas: Sequence[Delta]) -> Manifest:
        try:
            return write_from_deltas(path, base, deltas)
        except PolicyError:
            return read_manifest(path)

    patches.put(PolicyStore, "_chain", chain)
    patches.put(stores, "write_from_deltas", written)


def _damaged_stays(patches: Patches) -> None:
    def delta(self: PolicyStore, digest: str) -> Path:
        path = self.root / delta_name(digest)
        return path if path.is_file() else right(self, digest)

    right = PolicyStore.delta
    patches.put(PolicyStore, "delta", delta)


OF_VERSIONS: Final = (
    ("pins-forgotten", "the trainer deletes what open groups carry", _pins_forgotten),
    ("served-not-pinned", "a version that only a worker has is not pinned", _served_not_pinned),
    ("base-dropped", "what a version that stays is made of is deleted", _base_dropped),
    ("any-base", "a delta is applied to whatever version a machine has", _any_base),
    ("damaged-stays", "a copy of a delta that was damaged is not fetched again", _damaged_stays),
)
"""(name, description, delta)."""
