"""Decides from an address which policy store is meant; pyarrow's file systems only where asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dora_pipe.clock import Clock
from dora_pipe.config.model import Store
from dora_pipe.policies.store import PolicyStore


def open_store(
    root: Path,
    section: Store,
    *,
    run: str,
    clock: Clock | None = None,
    peers: Callable[[str, Path], bool] | None = None,
) -> PolicyStore:
    """The store of a run. `root` is its directory, or where copies of it lie if it is elsewhere.

    `peers` are asked before a store that lies elsewhere; see `PolicyStore`.
    Under an address every run has a folder of its own, so that none deletes files of another.
    Raises ConfigError for an address that cannot be used. Nothing is connected yet.
    """
    if not section.url:
        return PolicyStore(root, clock=clock)
    from dora_pipe.policies.arrow_files import open_files

    remote = open_files(section.url, folder=run, clock=clock)
    bytes_max = int(section.cache_gb * 1e9)
    return PolicyStore(root, remote, cache_bytes_max=bytes_max, clock=clock, peers=peers)
