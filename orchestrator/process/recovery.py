"""Reader of rounds with their control records, for restarts and audits.

Both topics are read in step, so memory is bounded by one round and one poll.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import LogTruncated, SchemaError
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.orchestrator.apply_control import read_control
from dora_pipe.orchestrator.fold import fold_round
from dora_pipe.orchestrator.process.snapshot_files import candidates
from dora_pipe.orchestrator.snapshots import Snapshot, fits_log
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import RoleStarted, RunStarted
from dora_pipe.schemas.rounds import Round, decode_round
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRound:
    """Round, its offset and its control records."""

    offset: int
    round: Round
    control: list[Record]

    def folded(self) -> list[tuple[int, bytes]]:
        """Return the control records for `fold_round`."""
        return [(record.offset, record.value) for record in self.control]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """State after the last round, and the content of control."""

    state: State
    run_started: bool
    incarnation: int
    """Newest orchestrator incarnation in control; -1 if none."""


def read_rounds(
    bus: Bus, topics: Topics, *, decisions_from: int = 0, control_from: int = 0
) -> Iterator[ReadRound]:
    """Yield every round with its control records.

    Raises LogTruncated if a folded record is gone, SchemaError with the offset of an unreadable
    round, BusError.
    """
    decisions = TopicPartition(topics.decisions, 0)
    end = bus.end(decisions)  # Read before control's end: rounds fold only older records.
    control = _Tail(bus, TopicPartition(topics.control, 0), control_from)
    try:
        for record in records_of(bus, {decisions: end}, start=decisions_from):
            try:
                round_ = decode_round(record.value)
            except SchemaError as error:
                why = f"decisions offset {record.offset}: {error.message}"
                raise SchemaError(why, path=error.path) from None
            if round_.control_next > control.end:
                raise LogTruncated(
                    f"round {round_.ordinal} folds {topics.control} up to {round_.control_next}, "
                    f"which ends at {control.end}"
                )
            below = control.below(round_.control_next)
            yield ReadRound(offset=record.offset, round=round_, control=below)
    finally:
        control.close()


def recover(bus: Bus, topics: Topics, snapshots: Path | None = None) -> Recovered:
    """Fold the log from the newest valid snapshot or the beginning. Raises InvariantBroken and
    errors of `read_rounds`."""
    start = None if snapshots is None else _begin(bus, topics, snapshots)
    state, decisions_from = (State(), 0) if start is None else (start.state, start.offset + 1)
    for read in read_rounds(
        bus, topics, decisions_from=decisions_from, control_from=state.control_next
    ):
        fold_round(state, read.round, read.folded())
    run_started, incarnation = state.started is not None, state.orchestrator_incarnation
    control = TopicPartition(topics.control, 0)
    for record in records_of(bus, {control: bus.end(control)}, start=state.control_next):
        decoded = read_control(record.value)
        run_started = run_started or isinstance(decoded, RunStarted)
        if isinstance(decoded, RoleStarted) and decoded.role == "orchestrator":
            incarnation = max(incarnation, decoded.incarnation)
    return Recovered(state=state, run_started=run_started, incarnation=incarnation)


def _begin(bus: Bus, topics: Topics, snapshots: Path) -> Snapshot | None:
    decisions = TopicPartition(topics.decisions, 0)
    end = bus.end(decisions)
    for snapshot in candidates(snapshots, topics.run):
        value = None
        if snapshot.offset < end:
            first = next(records_of(bus, {decisions: end}, start=snapshot.offset), None)
            value = first.value if first is not None and first.offset == snapshot.offset else None
        why = fits_log(snapshot, value)
        if not why:
            LOG.info("state after round %d from a snapshot", snapshot.state.rounds - 1)
            return snapshot
        LOG.warning("snapshot at decisions offset %d skipped: %s", snapshot.offset, why)
    LOG.info("no usable snapshot: folding the whole log")
    return None


class _Tail:
    def __init__(self, bus: Bus, partition: TopicPartition, start: int) -> None:
        self.end = bus.end(partition)
        self._records = records_of(bus, {partition: self.end}, start=start)
        self._ahead: Record | None = None

    def below(self, position: int) -> list[Record]:
        records: list[Record] = []
        while True:
            self._ahead = self._ahead or next(self._records, None)
            if self._ahead is None or self._ahead.offset >= position:
                return records
            records.append(self._ahead)
            self._ahead = None

    def close(self) -> None:
        self._records.close()
