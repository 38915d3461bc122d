"""Changes of batches as files: what users write of rows, and what a run that is trained again keeps
of it in its store, under its sha256. It decides the forms of both.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dora_pipe.catalogue.lent_groups import ChangedRows, decode_changed_rows
from dora_pipe.consumers.trainer.changed_batch import UNCHANGED, BatchChange
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.core.errors import PolicyError, SchemaError, UsageError
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import canonical
from dora_pipe.store.store import PolicyStore


def publish_change(store: PolicyStore, change: BatchChange) -> Blob | None:
    """Keep a change in the store; None, and no file, where nothing is otherwise. Raises OSError."""
    if change == UNCHANGED:
        return None
    said = ChangedRows(
        without=sorted(change.without), rewards=dict(change.rewards), weights=dict(change.weights)
    )

    def write(path: Path) -> None:
        path.write_bytes(canonical(msgspec.to_builtins(said)))

    return store.publish_blob("change", write)


def change_of(store: PolicyStore, history: CommitHistory) -> BatchChange:
    """That of a run, as `stored_change`."""
    retrained = None if history.run_started is None else history.run_started.retrained
    return stored_change(store, None if retrained is None else retrained.change)


def stored_change(store: PolicyStore, blob: Blob | None) -> BatchChange:
    """The change that a run names. Raises PolicyError where its file is gone or another one."""
    if blob is None:
        return UNCHANGED
    path = store.verify_blob("change", blob.sha256)
    try:
        said = decode_changed_rows(path.read_bytes())
    except SchemaError as error:
        raise PolicyError(f"{path}: {error.message}") from None
    return BatchChange(without=frozenset(said.without), rewards=said.rewards, weights=said.weights)


def named_rows(file: Path) -> list[str]:
    """Groups and trajectories that a file names, a line each; what stands behind `#` is a comment.
    Raises UsageError."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    found = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [line for line in found if line]


def weighed_rows(file: Path) -> dict[str, float]:
    """Trajectories with their weights, as ``g0000000042-003 0.5``, a line each. Raises
    UsageError."""
    found: dict[str, float] = {}
    for line in named_rows(file):
        name, _, weight = line.partition(" ")
        try:
            found[name] = float(weight)
        except ValueError:
            raise UsageError(
                f"{file}: {line!r} is no trajectory with a weight",
                hint="a line each, e.g. g0000000042-003 0.5",
            ) from None
    return found
