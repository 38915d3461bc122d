"""Records of the trajectories topic as control has named them, for who is about to read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dora_pipe.catalogue.database import Catalogue

COUNTS = "standing = 'bound'"
"""Of a record that counts for its group."""

_COLUMNS = (
    "trajectory_id, attempt, incarnation, standing, logged_ns, partition, record_offset, sha256"
)
_ORDER = "partition, record_offset"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRecord:
    """What control says of a record; `bus.logged` holds what lies there against it."""

    trajectory: str
    attempt: int
    epoch: int
    """Incarnation of the worker that wrote it."""
    standing: str
    """`bound`: it counts; `superseded`; `fenced`."""
    logged_ns: int
    partition: int
    offset: int
    sha256: str
    """Of its value, hex."""


def logged_records(
    catalogue: Catalogue, where: str, parameters: Sequence[Any] = ()
) -> dict[tuple[int, int], LoggedRecord]:
    """Records by partition and offset, in that order; `where` is a condition on `records`."""
    rows = catalogue.query(
        f"select {_COLUMNS} from records where {where} order by {_ORDER}", parameters
    )
    found = map(_record, rows)
    return {(one.partition, one.offset): one for one in found}


def counting_record(catalogue: Catalogue, trajectory: str) -> LoggedRecord | None:
    """The record that counts for a trajectory; None while there is none."""
    source = f"(from records where {COUNTS})"
    found = catalogue.keyed(_COLUMNS, source, "trajectory_id", trajectory, order=_ORDER)
    return _record(found[-1]) if found else None


def _record(row: tuple[Any, ...]) -> LoggedRecord:
    trajectory, attempt, epoch, standing, logged_ns, partition, offset, sha256 = row
    return LoggedRecord(
        trajectory=trajectory,
        attempt=attempt,
        epoch=epoch,
        standing=standing,
        logged_ns=logged_ns,
        partition=partition,
        offset=offset,
        sha256=sha256,
    )
