"""Measures what a round of the planner costs by the size of the run; decides nothing.

A state is built by production's own fold and planner: a quarter of the workers joins under each of
four versions and is filled, so that every slot runs a request. Then rounds are measured that find
it so, that fold what one turn of the bus brings, and that empty workers after a step, when a share
of the requests of older versions has ended.
"""

from __future__ import annotations

import gc
import math
import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.config.model import Config
from dora_pipe.orchestrator.apply_control import apply_control
from dora_pipe.orchestrator.planner import decide
from dora_pipe.orchestrator.state import State, Worker
from dora_pipe.orchestrator.state_ops import new_version
from dora_pipe.schemas.control import (
    LoggedEntry,
    RunStarted,
    TrajectoriesLogged,
    WorkerJoined,
    WorkerReady,
)
from dora_pipe.schemas.rounds import Move
from dora_pipe.sim.modelled_cluster import (
    NO_DIGEST,
    run_started,
    weights,
    worker_joined,
    worker_ready,
)

GROUP_SIZE: Final = 16
ROWS: Final = 1_000_000
"""Of the data set."""
KV_TOKENS: Final = 1_000_000
"""That a worker has room for."""
STEPS: Final = 1_000_000
"""More than any measurement commits."""
VERSIONS: Final = 4
SLOTS: Final = 64
TURN_WORKERS: Final = 32
"""Workers that report in one turn of the bus, each as many trajectories as it would then have."""
ENDED_SHARE: Final = 0.4
"""Of the requests of older versions, when a step is committed."""
REPEATS: Final = 10
"""Rounds of a kind; the fastest counts: what else the machine does is not the planner's cost."""
BUILD_ROUNDS_MAX: Final = 100_000
"""Rounds that fill the workers of one version."""
SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigure:
    """What a run of one size costs."""

    workers: int
    requests: int
    versions: int
    turn_ms: float
    """A round that folds the trajectories of one turn of the bus and refills their slots."""
    look_ms: float
    """A round with a trigger that finds nothing left to move, although the newest version waits."""
    step_ms: float
    """The round after a step that empties workers of older versions."""
    step_decisions: int
    step_moves: int
    all_moves: int
    """Moves of that round and of those that go on with it."""
    fold_us: float
    """Folding one logged trajectory."""
    state_mb: float | None
    """Memory of the state; of the largest alone, which is built first: what that gives back, the
    others find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """How a cost grows with the number of workers: fitted to ``cost = a * workers**exponent``."""

    cost: str
    exponent: float
    n_log_n: float
    """The exponent that n log n would have over the same sizes."""


def bench_plan(workers: Sequence[int]) -> list[PlanFigure]:
    """A figure per number of workers, fewest first."""
    sizes = sorted(set(workers), reverse=True)
    return [_measure(count, first=count == sizes[0]) for count in sizes][::-1]


def growth_of(figures: Sequence[PlanFigure]) -> list[Growth]:
    """Fits over all sizes; none for a single size."""
    sizes = [one.workers for one in figures]
    if len(set(sizes)) < 2:
        return []
    expected = exponent(sizes, [one * math.log(one) for one in sizes])
    costs = {
        "turn_ms": [one.turn_ms for one in figures],
        "look_ms": [one.look_ms for one in figures],
        "step_ms": [one.step_ms for one in figures],
        "fold_us": [one.fold_us for one in figures],
    }
    return [
        Growth(cost=name, exponent=exponent(sizes, values), n_log_n=expected)
        for name, values in costs.items()
    ]


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of the straight line through the logarithms, by least squares.

    Example: ``exponent([1, 2, 4], [3, 6, 12])`` is 1.
    """
    points = [
        (math.log(size), math.log(max(cost, 1e-9))) for size, cost in zip(sizes, costs, strict=True)
    ]
    middle = sum(x for x, _ in points) / len(points)
    above = sum((x - middle) * y for x, y in points)
    return above / sum((x - middle) ** 2 for x, _ in points)


def _measure(workers: int, *, first: bool) -> PlanFigure:
    run = _Run(workers)
    before = _rss_bytes()
    run.build()
    requests, memory = len(run.state.requests), _rss_bytes() - before
    gc.collect()
    gc.freeze()  # The collector would look at all of it again and again, and measure itself.
    turns = [run.turn() for _ in range(REPEATS)]
    run.end_many()
    step_ms, decisions, moves, all_moves = run.step()
    look = min(run.idle() for _ in range(REPEATS))
    gc.unfreeze()
    return PlanFigure(
        workers=workers,
        requests=requests,
        versions=VERSIONS,
        turn_ms=min(ms for ms, _ in turns),
        look_ms=look,
        step_ms=step_ms,
        step_decisions=decisions,
        step_moves=moves,
        all_moves=all_moves,
        fold_us=min(us for _, us in turns),
        state_mb=memory / 1e6 if first else None,
    )


class _Run:
    """A state, and the records that bring it about."""

    def __init__(self, workers: int) -> None:
        self.state = State()
        self._workers = workers
        self._offset = 0
        self._chance = random.Random(workers)
        self._apply(run_started(_config(workers), rows=ROWS))

    def build(self) -> None:
        """Fill a quarter of the workers under each version."""
        names = [f"w{number:05d}" for number in range(self._workers)]
        for version in range(VERSIONS):
            for name in names[version::VERSIONS]:
                self._apply(worker_joined(name, SLOTS, kv_tokens=KV_TOKENS))
            self._settle()
            if version + 1 < VERSIONS:
                self.state.now_ns += 60 * SECOND_NS
                new_version(self.state, weights(version + 1))
                self.state.trigger = ""

    def turn(self) -> tuple[float, float]:
        """(ms of the round, us of folding one trajectory) when some workers report."""
        state = self.state
        state.now_ns += SECOND_NS // 10
        hosts = state.index.hosts[state.version].workers
        chosen = self._chance.sample(sorted(hosts), min(TURN_WORKERS, len(hosts)))
        records = [self._logged(hosts[name], 2) for name in chosen]
        start = time.perf_counter()
        for record in records:
            self._apply(record)
        folded = time.perf_counter()
        decide(state)
        end = time.perf_counter()
        count = sum(len(record.trajectories) for record in records)
        return (end - start) * 1e3, (folded - start) * 1e6 / count

    def idle(self) -> float:
        """Milliseconds of a round that has a trigger, and finds nothing to do."""
        self.state.trigger = "asked"
        start = time.perf_counter()
        found = decide(self.state)
        spent = (time.perf_counter() - start) * 1e3
        assert not any(isinstance(one, Move) for one in found)
        return spent

    def end_many(self) -> None:
        """A share of the requests of older versions ends, without anybody planning."""
        state = self.state
        state.now_ns += 60 * SECOND_NS
        for version in range(VERSIONS - 1):
            for worker in list(state.index.hosts[version].workers.values()):
                share = self._chance.uniform(0, 2 * ENDED_SHARE)
                self._apply(self._logged(worker, int(share * len(worker.requests))))

    def step(self) -> tuple[float, int, int, int]:
        """(ms, decisions, moves) of the first round after a step; moves until nothing is left."""
        state = self.state
        for group in state.finished:  # They leave U, as the batches of further steps would take
            state.groups[group.group].phase = "taken"
        state.finished.clear()
        state.deadlines.clear()
        new_version(state, weights(VERSIONS))
        start = time.perf_counter()
        first = decide(state)
        spent = (time.perf_counter() - start) * 1e3
        moves = _moves(first)
        total, found = moves, first
        for _ in range(BUILD_ROUNDS_MAX):
            if not found:
                break
            found = decide(state)
            total += _moves(found)
        return spent, len(first), moves, total

    def _settle(self) -> None:
        for _ in range(BUILD_ROUNDS_MAX):
            loading = [one for one in self.state.workers.values() if one.loading]
            for worker in loading:
                self._apply(ready(worker))
            if not decide(self.state) and not loading:
                return

    def _logged(self, worker: Worker, count: int) -> TrajectoriesLogged:
        names = sorted(worker.requests)[:count]
        return logged(self.state, worker, names, self._offset)

    def _apply(self, record: RunStarted | WorkerJoined | WorkerReady | TrajectoriesLogged) -> None:
        rejected = self.state.counters.rejected
        apply_control(self.state, self._offset, record)
        assert self.state.counters.rejected == rejected, self.state.counters.rejection
        self._offset += 1


def _moves(decisions: Sequence[object]) -> int:
    return sum(isinstance(one, Move) for one in decisions)


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _config(workers: int) -> Config:
    """As many groups in flight as the workers have slots for, a batch per version."""
    return config_of(
        per_step=max(1, workers * SLOTS // GROUP_SIZE // 4),
        max_staleness=VERSIONS,
        in_flight_batches=float(VERSIONS + 1),
    )


def config_of(*, per_step: int, max_staleness: int, in_flight_batches: float) -> Config:
    """A run that never ends and evaluates nothing."""
    plain = {
        "run": {"name": "bench", "steps": STEPS},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "groups": {"size": GROUP_SIZE, "per_step": per_step},
        "staleness": {"max_staleness": max_staleness, "in_flight_batches": in_flight_batches},
        "evaluation": {"prompts": 0},
    }
    return msgspec.convert(plain, Config)


def logged(
    state: State, worker: Worker, names: Sequence[str], offset: int, *, version: int | None = None
) -> TrajectoriesLogged:
    """A worker has logged some of its requests; under its own version, if nothing is said."""
    known = worker.target if version is None else version
    return TrajectoriesLogged(
        at_ns=0,
        worker=worker.name,
        epoch=worker.epoch,
        version=known,
        digest=state.policies[known],
        trajectories=tuple(_entry(state, name, offset) for name in names),
    )


def _entry(state: State, trajectory: str, offset: int) -> LoggedEntry:
    request = state.requests[trajectory]
    return LoggedEntry(
        trajectory=trajectory,
        attempt=request.attempt,
        partition=state.groups[request.group].spec.partition,
        offset=offset,
        sha256=NO_DIGEST,
        bytes=1000,
        tokens=100,
        reward=float((request.sibling + offset) % 2),
        finish="stop",
    )


def ready(worker: Worker) -> WorkerReady:
    """A worker has loaded its target."""
    return worker_ready(worker.name, worker.epoch, worker.target, worker.digest, load_ms=1000.0)
