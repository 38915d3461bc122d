"""Contributions files: effects of each trajectory on the weights, as Arrow IPC."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.ipc

from dora_pipe.core.errors import DoraError

if TYPE_CHECKING:
    from dora_pipe.store.store import PolicyStore

SCHEMA: Final = pa.schema(
    [
        pa.field("trajectory", pa.utf8(), nullable=False),
        pa.field("group", pa.utf8(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("staleness", pa.int64(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("advantage", pa.float64()),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("ratio_mean", pa.float64()),
        pa.field("ratio_min", pa.float64()),
        pa.field("ratio_max", pa.float64()),
        pa.field("clipped_share", pa.float64()),
        pa.field("kl", pa.float64()),
        pa.field("loss_share", pa.float64()),
        pa.field("minibatch", pa.int64(), nullable=False),
        pa.field("micro_batch", pa.int64()),
        pa.field("weight_mean", pa.float64()),
        pa.field("masked_share", pa.float64()),
    ]
)
"""Arrow IPC file named by `step-committed`: one row per trajectory, sorted by id. `staleness` is
step - version. `reward` and `advantage` are null for invalid trajectories; ratios, KL and loss also
without a gradient. `minibatch` counts updates of the step, `micro_batch` passes of an update."""

TEACHER: Final = "teacher_logprobs"
"""Optional column: teacher log-probs of the counted tokens."""

WITH_TEACHER: Final = SCHEMA.append(pa.field(TEACHER, pa.list_(pa.float32()), nullable=False))

_ALONE: Final = pyarrow.ipc.IpcReadOptions(use_threads=False)
"""No thread pool: starting one shortly before exit can abort the process."""


def write_contributions(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as an Arrow IPC file. Raises OSError."""
    schema = WITH_TEACHER if any(TEACHER in row for row in rows) else SCHEMA
    table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    with path.open("wb") as file, pyarrow.ipc.new_file(file, schema) as writer:
        writer.write_table(table)


def read_contributions(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a contributions file, in batch order."""
    with pyarrow.ipc.open_file(pa.py_buffer(path.read_bytes()), options=_ALONE) as reader:
        rows: list[dict[str, Any]] = reader.read_all().to_pylist()
    return rows


def stored_contributions(store: PolicyStore | None, sha256: str) -> list[dict[str, Any]]:
    """Return the rows of a step; empty if the file is missing or unreadable."""
    try:
        if store is None or not store.has_blob("contributions", sha256):
            return []
        return read_contributions(store.blob("contributions", sha256))
    except (DoraError, OSError, ValueError):
        return []


Contributions = Callable[[str], Iterable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed:
    """Ratio metrics of a step; see docs/reference/metrics.md."""

    step: int
    effective: float | None
    """Effective sample size divided by the number of trajectories, 0 to 1."""
    mismatch: tuple[tuple[int, float], ...]
    """(staleness, mean of |ln(mean ratio)| over its trajectories)."""


def contributed(step: int, rows: Iterable[Mapping[str, Any]]) -> Contributed:
    """Return the metrics of these rows.

    The weight of a trajectory is its mean token ratio, trained policy to sampler.
    """
    rated = with_ratio(rows)
    weights = [row["ratio_mean"] for row in rated]
    squares = math.fsum(weight * weight for weight in weights)
    effective = math.fsum(weights) ** 2 / (len(weights) * squares) if weights else None
    logs = {stale: [distance(row) for row in own] for stale, own in by_staleness(rated).items()}
    mismatch = ((stale, sum(own) / len(own)) for stale, own in logs.items())
    return Contributed(step=step, effective=effective, mismatch=tuple(mismatch))


def with_ratio(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["ratio_mean"] is not None and row["ratio_mean"] > 0]


def distance(row: Mapping[str, Any]) -> float:
    """Return |ln(mean ratio)| of a trajectory."""
    return abs(math.log(row["ratio_mean"]))


def by_staleness(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["staleness"], []).append(row)
    return dict(sorted(groups.items()))
