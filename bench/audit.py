"""Cost of an audit compared with plain reading."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Final, Literal
from uuid import uuid4

import typer

from dora_pipe.audit.auditor import Auditor, AuditProgress
from dora_pipe.bench.audit_log import LogPlan, Written, write_log
from dora_pipe.bench.peak import peak_bytes
from dora_pipe.bench.support import emit_figures, reply, result_of, scratch, task_of
from dora_pipe.bus import open_bus
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.cli.options import JsonOption
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.topics import Topics

MILLIONS: Final = 10_000_000
TOKENS: Final = (2_048, 16_384)
LIMIT_S: Final = 3600.0

Reading = Literal["the bus alone", "audit", "audit --quick"]

_AUDITS: Final[dict[Reading, bool]] = {"audit": True, "audit --quick": False}
"""Whether values are decoded and plans recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFigure:
    """Median cost of one way; 1 MB is 10^6 bytes of trajectory values.

    `cpu_us` is per trajectory; `of_reading` is relative to plain reading.
    """

    bus: str
    tokens: int
    way: Reading
    trajectories: int
    trajectories_per_s: float
    mb_per_s: float
    cpu_us: float
    of_reading: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigure:
    """Peak resident memory until the middle and the end of an audit, in MB of 10^6 bytes.

    By the middle everything bounded is full.
    """

    trajectories: int
    mb: float
    more_trajectories: int
    more_mb: float
    ratio: float
    bytes_per_trajectory: float
    ten_million_mb: float
    """Extrapolated, not measured."""


def command(
    bus: Annotated[
        list[str] | None, typer.Option(help="Kafka log to compare with SQLite: kafka://HOST:PORT.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Tokens per trajectory; repeatable.")
    ] = None,
    trajectories: Annotated[int, typer.Option(min=1, help="Trajectories of each run.")] = 10_000,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions for medians.")] = 3,
    memory: Annotated[
        int, typer.Option(min=0, help="Trajectories of an audit for memory growth.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure full and quick audits on every log, and memory."""
    with scratch() as folder:
        figures = bench_audit(
            [f"sqlite:{folder}/bench.sqlite", *(bus or ())],
            tokens=tokens or TOKENS,
            trajectories=trajectories,
            repeats=repeats,
        )
        emit_figures(figures, as_json=as_json)
        if memory:
            emit_figures([bench_memory(folder, trajectories=memory)], as_json=as_json)


def bench_audit(
    urls: Sequence[str], *, tokens: Sequence[int], trajectories: int, repeats: int
) -> list[AuditFigure]:
    """Return figures of every log and length; topics are kept.

    Raises BusError, InvariantBroken if an audit finds anything.
    """
    figures = []
    for url in urls:
        with closing(open_bus(url)) as bus:
            for length in tokens:
                run = f"audit-{uuid4().hex[:12]}"
                written = write_log(bus, LogPlan(trajectories=trajectories, tokens=length, run=run))
                bench = _Bench(url, bus, Topics(run), length, written)
                figures += bench.figures(repeats)
    return figures


@dataclass(frozen=True, slots=True)
class _Spent:
    seconds: float
    cpu_s: float


@dataclass
class _Bench:
    url: str
    bus: Bus
    topics: Topics
    tokens: int
    written: Written

    def __post_init__(self) -> None:
        self.by_bus()  # Fill the page cache.

    def figures(self, repeats: int) -> list[AuditFigure]:
        spent: dict[Reading, list[_Spent]] = {}
        for _ in range(repeats):
            spent.setdefault("the bus alone", []).append(self._timed(self.by_bus))
            for way, full in _AUDITS.items():
                audit = partial(audit_log, self.bus, self.topics, full=full)
                spent.setdefault(way, []).append(self._timed(audit))
        reading_s = statistics.median(run.seconds for run in spent["the bus alone"])
        return [self._figure(way, runs, reading_s) for way, runs in spent.items()]

    def _figure(self, way: Reading, runs: Sequence[_Spent], reading_s: float) -> AuditFigure:
        seconds = statistics.median(run.seconds for run in runs)
        count = self.written.trajectories
        return AuditFigure(
            bus=self.url.partition(":")[0],
            tokens=self.tokens,
            way=way,
            trajectories=count,
            trajectories_per_s=count / seconds,
            mb_per_s=self.written.trajectory_bytes / 1e6 / seconds,
            cpu_us=statistics.median(run.cpu_s for run in runs) * 1e6 / count,
            of_reading=reading_s / seconds,
        )

    def _timed(self, work: Callable[[], object]) -> _Spent:
        cpu_s, start_s = self._cpu_s(), time.perf_counter()
        work()
        return _Spent(time.perf_counter() - start_s, self._cpu_s() - cpu_s)

    def _cpu_s(self) -> float:
        return sum(os.times()[:2])

    def by_bus(self) -> int:
        return sum(
            1 for topic in self.topics.all() for _ in records_of(self.bus, ends_of(self.bus, topic))
        )


def audit_log(
    bus: Bus,
    topics: Topics,
    *,
    full: bool = True,
    on_piece: Callable[[AuditProgress], None] = lambda progress: None,
) -> None:
    """Audit a log. Raises InvariantBroken."""
    auditor = Auditor(bus, topics, None, full=full, on_piece=lambda: on_piece(auditor.progress))
    try:
        auditor.advance()
        report = auditor.finish()
    finally:
        auditor.close()
    if not report.holds:
        raise InvariantBroken(report.violations[0].line)


def bench_memory(folder: Path, *, trajectories: int) -> MemoryFigure:
    """Audit a run in a separate process."""
    path = folder / "memory.sqlite"
    with closing(open_bus(f"sqlite:{path}")) as bus:
        written = write_log(bus, LogPlan(trajectories=trajectories, tokens=32, run="memory"))
    curve = _peaks(path)
    many, many_bytes = written.trajectories, curve[-1][1]
    few, few_bytes = next(point for point in curve if 2 * point[0] >= many)
    slope = (many_bytes - few_bytes) / (many - few)
    return MemoryFigure(
        trajectories=few,
        mb=few_bytes / 1e6,
        more_trajectories=many,
        more_mb=many_bytes / 1e6,
        ratio=many_bytes / few_bytes,
        bytes_per_trajectory=slope,
        ten_million_mb=(many_bytes + slope * (MILLIONS - many)) / 1e6,
    )


def _peaks(path: Path) -> list[tuple[int, int]]:
    return result_of("dora_pipe.bench.audit", str(path), list[tuple[int, int]], limit_s=LIMIT_S)


def _curve(path: str) -> list[tuple[int, int]]:
    curve: list[tuple[int, int]] = []
    with closing(open_bus(f"sqlite:{path}")) as bus:
        audit_log(
            bus,
            Topics("memory"),
            on_piece=lambda progress: curve.append((progress.records, peak_bytes("cpu"))),
        )
    return [*curve, (curve[-1][0], peak_bytes("cpu"))]


if __name__ == "__main__":
    reply(_curve(task_of(str)))
