"""How long an orchestrator takes to start again: the whole log folded, or only what came last."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from dora_pipe.bench.audit_log import LogPlan, write_log
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.orchestrator.recovery import fold_log, recover
from dora_pipe.orchestrator.snapshots import SNAPSHOT_EVERY, WriteSnapshot, body_of, write
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.topics import Topics

TOKENS = 8
"""Per trajectory: the orchestrator never reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartFigures:
    """One length of log."""

    rounds: int
    control: int
    steps: int
    folded_s: float
    """Restart without a snapshot."""
    snapshot_s: float
    """Restart from the newest snapshot a run would have: at most `SNAPSHOT_EVERY` rounds old."""
    rounds_after: int
    """Rounds folded after that snapshot."""
    times: float
    """How much shorter."""
    encode_ms: float
    """What one snapshot costs the loop, every `SNAPSHOT_EVERY` rounds."""
    write_ms: float
    """What it costs its own thread."""
    state_bytes: int
    file_bytes: int


def bench_restart(folder: Path, trajectories: list[int]) -> Iterator[RestartFigures]:
    """Write a log of so many trajectories, and start an orchestrator at its end both ways."""
    for number, count in enumerate(trajectories):
        with closing(SqliteBus(folder / f"{number}.sqlite")) as bus:
            plan = LogPlan(trajectories=count, tokens=TOKENS)
            written = write_log(bus, plan)
            yield _measure(bus, Topics(plan.run), folder / f"snapshots-{number}", written.control)


def _measure(bus: SqliteBus, topics: Topics, folder: Path, control: int) -> RestartFigures:
    began_s = time.perf_counter()
    whole = recover(bus, topics)
    folded_s = time.perf_counter() - began_s
    taken, encode_s, write_s = _snapshot(bus, topics, folder, whole.state.rounds)
    began_s = time.perf_counter()
    found = recover(bus, topics, folder)
    snapshot_s = time.perf_counter() - began_s
    assert found.state.digest() == whole.state.digest()
    (file,) = folder.iterdir()
    return RestartFigures(
        rounds=whole.state.rounds,
        control=control,
        steps=whole.state.version,
        folded_s=round(folded_s, 3),
        snapshot_s=round(snapshot_s, 3),
        rounds_after=whole.state.rounds - taken.rounds,
        times=round(folded_s / snapshot_s, 1),
        encode_ms=round(encode_s * 1e3, 3),
        write_ms=round(write_s * 1e3, 3),
        state_bytes=taken.bytes,
        file_bytes=file.stat().st_size,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Taken:
    rounds: int
    bytes: int


def _snapshot(
    bus: SqliteBus, topics: Topics, folder: Path, rounds: int
) -> tuple[_Taken, float, float]:
    """The newest snapshot that a run with so many rounds has; a short one's is its first half's."""
    wanted = rounds // SNAPSHOT_EVERY * SNAPSHOT_EVERY or max(1, rounds // 2)
    for folded in fold_log(bus, topics):
        if folded.state.rounds == wanted:
            return _take(folder, topics.run, folded.state, folded.at.offset)
    raise AssertionError(f"there are {rounds} rounds")


def _take(folder: Path, run: str, state: State, offset: int) -> tuple[_Taken, float, float]:
    began_s = time.perf_counter()
    body = body_of(state)
    encoded_s = time.perf_counter()
    write(folder, run, WriteSnapshot(offset=offset, digest=state.digest(), body=body))
    written_s = time.perf_counter()
    taken = _Taken(rounds=state.rounds, bytes=sum(map(len, body.pieces())))
    return taken, encoded_s - began_s, written_s - encoded_s
