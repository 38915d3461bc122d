"""What the catalogue costs: following a log, memory, saving and opening, frequent questions."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Final

from dora_pipe.bench.audit_log import (
    START_NS,
    LogPlan,
    config_of,
    role_started,
    run_started,
    weights,
    worker_joined,
    write_log,
)
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.catalogue.builder import CatalogueBuilder
from dora_pipe.catalogue.database import Catalogue
from dora_pipe.catalogue.reading import BATCH_ROWS, FILE, LivingCatalogue, read_catalogue
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    LoggedEntry,
    StepCommitted,
    TakenGroup,
    TakenTrajectory,
    TrajectoriesLogged,
)
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import Dispatch, GroupSpec, Place, PlacedSibling, Round, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex

TOKENS: Final = 8
"""Per trajectory of a written log: the catalogue never reads them."""

SIBLINGS: Final = 8
PER_STEP: Final = 512
STEP_NS: Final = 60_000_000_000

LENGTHS: Final = (128_000,)
"""Of logs that are written."""

GROWTH_FROM: Final = 0.4
"""Of a run: before that, what comes once is still coming (code, buffers, rows that are not
compressed yet)."""

REPEATS: Final = 5

OVERVIEW: Final = (
    "from steps order by step",
    "select fate, count(*) from groups group by fate",
    "from evaluations",
    "select worker, count(*), sum(tokens) from trajectories group by worker",
    """select ceil(log2(greatest(t.tokens, 1))) as length, g.fate, count(*),
              avg(t.logged_ns - t.placed_ns), avg(g.taken_ns - g.complete_ns)
       from trajectories t join groups g using (group_id) group by all""",
)
"""What the first page of a run asks."""

PAGE: Final = "from trajectories order by logged_ns desc limit 50"
GROUP: Final = "from trajectories where group_id = 'g0000000100'"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueFigures:
    """One length of log. Times of questions are the least of `REPEATS`."""

    trajectories: int
    follow_us: float
    """CPU time per trajectory: reading, decoding, deciding what counts, inserting."""
    once_mb: float
    each_bytes: float
    """By how much the process has grown: once, and with every trajectory."""
    tables_bytes: float
    """Of the tables in memory, per trajectory."""
    file_bytes: float
    """Of the saved catalogue, per trajectory."""
    open_ms: float
    """Opening the saved one and asking how many trajectories it has; wall clock."""
    overview_ms: float
    page_ms: float
    group_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """What a long run costs who follows it, without its log."""

    groups: int
    trajectories: int
    us: float
    """CPU time per trajectory: deciding what counts, inserting."""
    grown_mb: float
    once_mb: float
    each_bytes: float
    """As of `CatalogueFigures`."""


class _Growth:
    """By how much this process grows while trajectories come; measured from here on."""

    def __init__(self) -> None:
        gc.collect()
        self._began_bytes = _rss_bytes()
        self._points: list[tuple[int, int]] = []

    def note(self, trajectories: int) -> None:
        """So many have come."""
        self._points.append((trajectories, _rss_bytes() - self._began_bytes))

    @property
    def grown_mb(self) -> float:
        """In all."""
        return self._points[-1][1] / 1e6

    @property
    def line(self) -> tuple[float, float]:
        """(MB once, bytes per trajectory): the line through the points of the later run."""
        count = self._points[-1][0]
        late = [one for one in self._points if one[0] >= GROWTH_FROM * count]
        if len({trajectories for trajectories, _ in late}) < 2:
            return self.grown_mb, 0.0  # too short a run
        each, once = linear_regression(*zip(*late, strict=True))
        return once / 1e6, each


def bench_follow(folder: Path, trajectories: list[int]) -> Iterator[CatalogueFigures]:
    """Write a log of so many trajectories; follow it, save the catalogue, open it, ask."""
    import duckdb  # noqa: F401  its import is no part of any figure

    for number, count in enumerate(trajectories):
        with closing(SqliteBus(folder / f"{number}.sqlite")) as bus:
            plan = LogPlan(trajectories=count, tokens=TOKENS)
            write_log(bus, plan)
            yield _followed(bus, Topics(plan.run), folder / f"{number}-{FILE}")


def _followed(bus: SqliteBus, topics: Topics, path: Path) -> CatalogueFigures:
    growth, began_s = _Growth(), time.process_time()
    with closing(LivingCatalogue(bus, topics)) as living:
        while living.advance():
            growth.note(_count(living.catalogue))
        living.refresh()
    growth.note(_count(living.catalogue))
    followed_s = time.process_time() - began_s
    with closing(living.catalogue) as made:
        count, tables = _count(made), made.memory_bytes
    once_mb, each_bytes = growth.line
    read_catalogue(bus, topics, path).close()
    began_s = time.perf_counter()
    with closing(read_catalogue(bus, topics, path)) as opened:
        assert _count(opened) == count
        open_s = time.perf_counter() - began_s
        return CatalogueFigures(
            trajectories=count,
            follow_us=followed_s / count * 1e6,
            once_mb=once_mb,
            each_bytes=each_bytes,
            tables_bytes=tables / count,
            file_bytes=path.stat().st_size / count,
            open_ms=open_s * 1e3,
            overview_ms=_asked_ms(opened, *OVERVIEW),
            page_ms=_asked_ms(opened, PAGE),
            group_ms=_asked_ms(opened, GROUP),
        )


def bench_memory(groups: int) -> MemoryFigures:
    """Play a run of so many groups to a catalogue in memory."""
    with closing(Catalogue()) as catalogue:
        growth, began_s = _Growth(), time.process_time()
        builder = CatalogueBuilder()
        for played, _ in enumerate(_played(builder, groups)):
            if builder.made >= BATCH_ROWS:
                catalogue.append(builder.drain())
                growth.note(played * SIBLINGS)
        catalogue.append(builder.drain())
        catalogue.refresh(builder.live())
        seconds = time.process_time() - began_s
        growth.note(count := _count(catalogue))
    once_mb, each_bytes = growth.line
    return MemoryFigures(
        groups=groups,
        trajectories=count,
        us=seconds / count * 1e6,
        grown_mb=growth.grown_mb,
        once_mb=once_mb,
        each_bytes=each_bytes,
    )


def _played(builder: CatalogueBuilder, groups: int) -> Iterator[None]:
    """Every group is dispatched, sampled by one of 64 workers, trained; a step after the other."""
    plan = LogPlan(trajectories=groups * SIBLINGS, tokens=TOKENS, per_step=PER_STEP)
    builder.fact(0, run_started(config_of(plan)))
    builder.fact(1, role_started("trainer", 0))
    workers = range(2, 66)
    for epoch in workers:
        builder.fact(epoch, worker_joined(f"w{epoch}", 64))
    offset, steps = len(workers) + 2, -(-groups // PER_STEP)
    for step in range(steps):
        specs = [_spec(step, one) for one in range(step * PER_STEP, (step + 1) * PER_STEP)]
        at_ns = START_NS + step * STEP_NS
        for spec in specs[: groups - step * PER_STEP]:
            epoch = workers[spec.ordinal % len(workers)]
            builder.round(_dispatched(spec, epoch, at_ns), step)
            builder.fact(offset, _logged(spec, epoch, at_ns + STEP_NS // 2))
            offset += 1
            yield
        _train(builder, step, specs[: groups - step * PER_STEP], at_ns + STEP_NS - 1)


def _spec(step: int, ordinal: int) -> GroupSpec:
    return GroupSpec(
        group=group_id("train", ordinal),
        ordinal=ordinal,
        purpose="train",
        version=step,
        digest="",
        deadline=step + 1,
        partition=0,
        dataset_digest="",
        index=ordinal % 1000,
        data_epoch=0,
        seed=0,
        size=SIBLINGS,
    )


def _dispatched(spec: GroupSpec, epoch: int, at_ns: int) -> Round:
    siblings = tuple(PlacedSibling(sibling=one, attempt=1) for one in range(SIBLINGS))
    decisions = (
        Dispatch(reason="a slot is free", spec=spec),
        Place(reason="its turn", spec=spec, worker=f"w{epoch}", epoch=epoch, siblings=siblings),
    )
    return Round(
        ordinal=spec.ordinal, role_epoch=0, now_ns=at_ns, control_next=0, decisions=decisions
    )


def _logged(spec: GroupSpec, epoch: int, at_ns: int) -> TrajectoriesLogged:
    entries = tuple(
        LoggedEntry(
            trajectory=trajectory_id(spec.group, one),
            attempt=1,
            partition=0,
            offset=spec.ordinal * SIBLINGS + one,
            sha256=sha256_hex(f"{spec.ordinal} {one}".encode()),
            bytes=2000 + one,
            tokens=100 + (spec.ordinal * 37 + one * 11) % 900,
            reward=float((spec.ordinal + one) % 3 == 0),
            finish="stop",
        )
        for one in range(SIBLINGS)
    )
    return TrajectoriesLogged(
        at_ns=at_ns + spec.ordinal,
        worker=f"w{epoch}",
        epoch=epoch,
        version=spec.version,
        digest="",
        trajectories=entries,
    )


def _train(builder: CatalogueBuilder, step: int, specs: list[GroupSpec], at_ns: int) -> None:
    groups = tuple(
        TakenGroup(
            group=spec.group,
            version=spec.version,
            deadline=spec.deadline,
            trajectories=tuple(
                TakenTrajectory(
                    trajectory=trajectory_id(spec.group, one),
                    attempt=1,
                    epoch=0,
                    partition=0,
                    offset=0,
                    sha256="",
                )
                for one in range(SIBLINGS)
            ),
        )
        for spec in specs
    )
    take = TakeBatch(reason="all finished", step=step, attempt=1, groups=groups, settings={})
    builder.round(
        Round(ordinal=step, role_epoch=0, now_ns=at_ns, control_next=0, decisions=(take,)), step
    )
    manifest = weights(step + 1)
    builder.fact(
        step,
        StepCommitted(
            at_ns=at_ns + 1,
            step=step,
            attempt=1,
            role_epoch=0,
            groups=groups,
            batch_digest=batch_digest(groups),
            digest_before="",
            digest_after=manifest.digest,
            policy=manifest,
            contributions=Blob(sha256="", bytes=0),
            figures={"loss": 0.0, "grad_norm": 1.0},
            settings={},
            numerics={},
            decisions_next=0,
            compute_s=1.0,
        ),
    )


def _count(catalogue: Catalogue) -> int:
    found = catalogue.one("select count(*) from trajectories")
    assert found is not None
    return int(found[0])


def _asked_ms(catalogue: Catalogue, *questions: str) -> float:
    least_s = float("inf")
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        for question in questions:
            catalogue.query(question)
        least_s = min(least_s, time.perf_counter() - began_s)
    return least_s * 1e3


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096
