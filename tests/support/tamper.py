"""Editor of a copied recorded run for forgery tests.

`Tamper` edits records of the SQLite file and leaves the chain of rounds broken. `Tamper.mend`
repairs every chain and computable state digest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_control import read_control
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.fold import close_round, fold_records
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    AnyControl,
    StepCommitted,
    TakenGroup,
    TrajectoriesLogged,
    TrajectoryLogged,
    decode_control,
)
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.rounds import (
    GENESIS_CHAIN,
    AnyDecision,
    Round,
    TakeBatch,
    chain_of,
    decode_round,
    fold_bytes,
)
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_trajectory
from dora_pipe.schemas.wire import encode
from tests.support.recorded_run import RecordedRun

Pairs = tuple[tuple[str, bytes], ...]
Record = TypeVar("Record", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    topic: str
    partition: int
    offset: int
    key: bytes
    headers: Pairs
    value: bytes


class Tamper:
    """Open copy of a run. Example: ``with Tamper(run.copy(tmp_path / "x")) as log: ...``"""

    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        self._db = sqlite3.connect(run.log)
        rows = self._db.execute("SELECT name, id FROM topics").fetchall()
        self._topics: dict[str, int] = dict(rows)

    def __enter__(self) -> Tamper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._db.commit()
        self._db.close()

    # Raw records

    def rows(self, topic: str) -> list[Row]:
        name = f"{self.run.run}.{topic}"
        cursor = self._db.execute(
            "SELECT partition, offset, key, headers, value FROM log WHERE topic = ? ORDER BY at",
            (name,),
        )
        return [
            Row(
                topic=topic,
                partition=partition,
                offset=offset,
                key=key,
                headers=_headers(headers),
                value=value,
            )
            for partition, offset, key, headers, value in cursor.fetchall()
        ]

    def put(self, row: Row) -> None:
        headers = msgspec.msgpack.encode(row.headers) if row.headers else None
        self._db.execute(
            "INSERT OR REPLACE INTO records (at, key, headers, value) VALUES (?, ?, ?, ?)",
            (self._at(row), row.key, headers, row.value),
        )

    def remove(self, row: Row) -> None:
        self._db.execute("DELETE FROM records WHERE at = ?", (self._at(row),))

    def _at(self, row: Row) -> int:
        topic = self._topics[f"{self.run.run}.{row.topic}"]
        return topic << 52 | row.partition << 40 | row.offset

    # Decoded records

    def control(self) -> Iterator[tuple[Row, AnyControl]]:
        for row in self.rows("control"):
            record = decode_control(row.value)
            assert isinstance(record, AnyControl)
            yield row, record

    def facts(self, kind: type[Record]) -> list[tuple[Row, Record]]:
        return [(row, record) for row, record in self.control() if isinstance(record, kind)]

    def logged(self) -> list[tuple[Row, TrajectoriesLogged, int, TrajectoryLogged]]:
        return [
            (row, record, index, fact)
            for row, record in self.facts(TrajectoriesLogged)
            for index, fact in enumerate(record.facts())
        ]

    def log_otherwise(
        self, row: Row, record: TrajectoriesLogged, index: int, **changes: Any
    ) -> None:
        entries = list(record.trajectories)
        entries[index] = msgspec.structs.replace(entries[index], **changes)
        self.rewrite(row, msgspec.structs.replace(record, trajectories=tuple(entries)))

    def rounds(self) -> list[tuple[Row, Round]]:
        return [(row, decode_round(row.value)) for row in self.rows("decisions")]

    def rewrite(self, row: Row, record: msgspec.Struct) -> None:
        self.put(replace(row, value=encode(record)))

    def decide_otherwise(self, change: Callable[[AnyDecision], AnyDecision | None]) -> int:
        """Change decisions, or remove them with None; return the number of changed rounds."""
        changed = 0
        for row, round_ in self.rounds():
            decisions = [change(decision) for decision in round_.decisions]
            kept = tuple(decision for decision in decisions if decision is not None)
            if kept != round_.decisions:
                self.rewrite(row, msgspec.structs.replace(round_, decisions=kept))
                changed += 1
        return changed

    def rebatch(self, change: Callable[[int, TakenGroup], TakenGroup | None]) -> None:
        """Change groups of batches in decisions and commits, with matching digests."""

        def groups(step: int, groups: tuple[TakenGroup, ...]) -> tuple[TakenGroup, ...]:
            changed = (change(step, group) for group in groups)
            return tuple(entry for entry in changed if entry is not None)

        def decide(decision: AnyDecision) -> AnyDecision:
            if not isinstance(decision, TakeBatch):
                return decision
            return msgspec.structs.replace(decision, groups=groups(decision.step, decision.groups))

        self.decide_otherwise(decide)
        for row, fact in self.facts(StepCommitted):
            new = groups(fact.step, fact.groups)
            digest = batch_digest(new)
            self.rewrite(row, msgspec.structs.replace(fact, groups=new, batch_digest=digest))

    def trained(self, index: int = 40) -> tuple[Row, TrajectoryLogged]:
        used = {
            trajectory.trajectory: (trajectory.partition, trajectory.offset)
            for _, fact in self.facts(StepCommitted)
            for group in fact.groups
            for trajectory in group.trajectories
        }
        rows = {(row.partition, row.offset): row for row in self.rows("trajectories")}
        results = [
            (rows[fact.partition, fact.offset], fact)
            for *_, fact in self.logged()
            if used.get(fact.trajectory) == (fact.partition, fact.offset)
        ]
        return results[index]

    def reencode(self, row: Row, change: Callable[[Trajectory], Trajectory]) -> Row:
        value, headers = encode_trajectory(change(decode_trajectory(row.value)))
        return replace(row, value=value, headers=header_pairs(headers))

    def mend(self) -> None:
        """Recompute the chain, and state digests while rounds fold."""
        control = [(row.offset, row.value) for row in self.rows("control")]
        state: State | None = State()
        chain, start = GENESIS_CHAIN, 0
        for row, round_ in self.rounds():
            folded = [entry for entry in control if start <= entry[0] < round_.control_next]
            start = round_.control_next
            state = _fold(state, round_, folded)
            if round_.state_digest is not None and state is not None:
                round_ = msgspec.structs.replace(round_, state_digest=state.digest())
            content = b"".join(fold_bytes(offset, value) for offset, value in folded)
            chain = chain_of(chain, content, round_)
            self.rewrite(row, msgspec.structs.replace(round_, chain=chain))


def _fold(state: State | None, round_: Round, control: list[tuple[int, bytes]]) -> State | None:
    if state is None:
        return None
    try:
        fold_records(state, round_, [(offset, read_control(value)) for offset, value in control])
        for decision in round_.decisions:
            apply_decision(state, decision)
    except InvariantBroken:
        return None
    close_round(state, round_)
    return state


def _headers(data: bytes | None) -> Pairs:
    return msgspec.msgpack.decode(data, type=Pairs) if data else ()
