"""Writes snapshots in a thread of its own; decides that a slow disk costs snapshots, not rounds."""

from __future__ import annotations

import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any, Final

from dora_pipe.orchestrator.snapshots import (
    SNAPSHOTS_KEPT,
    WriteSnapshot,
    file_bytes,
    snapshots_in,
)

LOG = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
"""Closing waits this long for a snapshot under way."""

TEMPORARY: Final = ".tmp"


class SnapshotPort:
    """A `dora_pipe.runtime.Port`. While one snapshot is being written, others are passed by."""

    effects: tuple[type, ...] = (WriteSnapshot,)
    busy = False

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        self._todo: queue.Queue[WriteSnapshot | None] = queue.Queue(maxsize=1)
        self._thread = threading.Thread(target=self._work, name="snapshots", daemon=True)
        self._thread.start()

    def start(self, effect: WriteSnapshot) -> None:
        """Hand it to the thread, if that has nothing to do."""
        try:
            self._todo.put_nowait(effect)
        except queue.Full:
            LOG.info("the snapshot at decisions offset %d is left out", effect.offset)

    def poll(self) -> list[Any]:
        """Nobody waits for a snapshot."""
        return []

    def close(self) -> None:
        """Wait a little for what is under way; idempotent."""
        if self._thread.is_alive():
            try:
                self._todo.put(None, timeout=CLOSE_S)
            except queue.Full:
                return
            self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while (effect := self._todo.get()) is not None:
            try:
                write(self._folder, self._run, effect)
            except OSError as error:
                LOG.warning("no snapshot at decisions offset %d: %s", effect.offset, error)


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
