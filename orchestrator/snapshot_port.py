"""Writes snapshots in a thread of its own; decides that a slow disk costs snapshots, not rounds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from dora_pipe.core.effect_runner import EffectRunner, Handler, Handlers, unanswered
from dora_pipe.orchestrator.snapshots import (
    SNAPSHOTS_KEPT,
    WriteSnapshot,
    file_bytes,
    snapshots_in,
)

LOG = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
"""Closing waits this long for a snapshot under way."""

WAITING_MAX: Final = 1
"""Beside the one that is being written."""

TEMPORARY: Final = ".tmp"


class SnapshotPort:
    """A `core.runtime.Port`. While one snapshot is being written, others are passed by."""

    effects: tuple[type, ...] = (WriteSnapshot,)
    busy = False

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        handlers: Handlers = {WriteSnapshot: Handler(do=self._write, failed=_left_out)}
        self._runner = EffectRunner("snapshots", handlers, asked_max=WAITING_MAX)

    def start(self, effect: WriteSnapshot) -> None:
        """Hand it to the thread, if that has nothing to do."""
        self._runner.start(effect)

    def poll(self) -> list[Any]:
        """Nobody waits for a snapshot."""
        return self._runner.poll()

    def close(self) -> None:
        """Wait a little for what is under way; idempotent."""
        self._runner.close(wait_s=CLOSE_S)

    def _write(self, effect: WriteSnapshot) -> Iterator[Any]:
        write(self._folder, self._run, effect)
        yield from ()


def _left_out(effect: WriteSnapshot, error: Exception) -> Iterable[Any]:
    LOG.warning("no snapshot at decisions offset %d", effect.offset)
    return unanswered(effect, error)


def write(folder: Path, run: str, effect: WriteSnapshot) -> Path:
    """Write a snapshot, all or nothing, and remove the oldest. Raises OSError."""
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
