"""Figures of finished runs, from their logs, and their comparison.

`target_s` is where the isotonic regression of the rewards reaches the target; the first evaluation
above it would be biased.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final

import msgspec

from dora_pipe.audit.auditor import audit, raise_if_broken
from dora_pipe.audit.reading import horizon_of
from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_trajectory

BASES: Final = ("sync", "one-step", "dora")

T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""0.975 quantiles of Student's t from 1 degree of freedom; the last is used beyond."""

STEPS: Final = "select committed_ns, trajectories, compute_s from steps order by step"

EVALUATED: Final = """
    select version, avg(trajectories.reward),
           count(distinct group_id) filter (where groups.outcome <> 'open')
    from trajectories join groups using (group_id)
    where purpose = 'eval' group by version order by version"""

Span = tuple[int, int]
"""[start, end) in ns."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Entrant, settings and seed."""

    entrant: str
    batches: float
    """Batches in flight."""
    learning_rate: float
    filtered: bool
    """Whether groups without advantage are replaced."""
    seed: int

    def __str__(self) -> str:
        kept = "" if self.filtered else ", no filter"
        return (
            f"{self.entrant}, C {self.batches:g}, learning rate {self.learning_rate:g}{kept},"
            f" seed {self.seed}"
        )


class ParadigmRun(msgspec.Struct, frozen=True, kw_only=True):
    setting: str
    """Digest of what compared cells share."""
    cell: Cell
    steps: int
    seconds: float
    samples_per_s: float
    """Trained trajectories per second."""
    target_s: float | None
    """Time to the target reward; None if not reached."""
    course: tuple[tuple[float, float], ...]
    """(commit time of the version in s, mean reward) of every evaluation."""
    reward: float
    slots_busy: float
    """Mean share of slots in use."""
    training: float
    """Share of time in which the trainer computed."""
    staleness: float
    """Mean staleness of trained groups at dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    entrant: str
    base: str
    mean: float
    ratio: float
    """Geometric mean of pairs."""
    low: float
    high: float
    seeds: int
    interval: tuple[float, float] | None
    """95 % interval by Student's t over the pairs' logarithms; None for one pair."""

    @property
    def distinguishable(self) -> bool:
        """Report whether the interval excludes 1."""
        return self.interval is not None and not self.interval[0] <= 1.0 <= self.interval[1]


def measure_run(
    bus: Bus, topics: Topics, *, cell: Cell, setting: str, target: float
) -> ParadigmRun:
    """Return a run's figures. Raises InvariantBroken unless its audit passes."""
    report = audit(bus, topics, None)
    raise_if_broken(report)
    with closing(read_catalogue(bus, topics)) as tables:
        steps = tables.records(STEPS)
        ((begin,),) = tables.query("select started_ns from runs")
        rewards = evaluated(tables)
        slots_of = dict(tables.query("select incarnation, slots from workers"))
    end = steps[-1]["committed_ns"]
    seconds = (end - begin) / 1e9
    spans = spans_of(bus, topics, begin, end)
    slots = sum(slots_of[incarnation] for incarnation in spans)
    course = tuple(  # version v exists from the commit of step v - 1
        ((steps[version - 1]["committed_ns"] - begin) / 1e9 if version else 0.0, reward)
        for version, reward in rewards
    )
    busy_s = (
        sum(stop - start for worker_spans in spans.values() for start, stop in worker_spans) / 1e9
    )
    return ParadigmRun(
        setting=setting,
        cell=cell,
        steps=len(steps),
        seconds=seconds,
        samples_per_s=sum(step["trajectories"] for step in steps) / seconds,
        target_s=crossing(isotonic(course), target),
        course=course,
        reward=course[-1][1] if course else 0.0,
        slots_busy=busy_s / (seconds * max(1, slots)),
        training=sum(step["compute_s"] for step in steps) / seconds,
        staleness=_mean_of(report.staleness),
    )


def evaluated(tables: Catalogue) -> list[tuple[int, float]]:
    """Return (version, mean reward) of finished evaluations."""
    rows = tables.query(EVALUATED)
    most_groups = max((groups for _, _, groups in rows), default=0)
    return [
        (version, reward)
        for version, reward, groups in rows
        if most_groups and groups == most_groups
    ]


def isotonic(course: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the isotonic regression by pooling adjacent violators (Barlow et al. 1972).

    Example: ``isotonic([(0.0, 0.4), (1.0, 0.8), (2.0, 0.6)])`` is, to rounding, ``[(0.0, 0.4),
    (1.0, 0.7), (2.0, 0.7)]``
    """
    pools: list[list[float]] = []
    for _, reward in course:
        pools.append([reward])
        while len(pools) > 1 and fmean(pools[-2]) >= fmean(pools[-1]):
            worse = pools.pop()
            pools[-1] += worse
    fitted = [fmean(pool) for pool in pools for _ in pool]
    return [(at_s, reward) for (at_s, _), reward in zip(course, fitted, strict=True)]


def crossing(course: Sequence[tuple[float, float]], target: float) -> float | None:
    """Return when (seconds, reward) points first reach `target`; None if never.

    Example: ``crossing([(0.0, 0.4), (10.0, 0.8)], 0.6) == 5.0``
    """
    before: tuple[float, float] | None = None
    for at_s, reward in course:
        if reward >= target:
            if before is None:
                return at_s
            share = (target - before[1]) / (reward - before[1])
            return before[0] + share * (at_s - before[0])
        before = (at_s, reward)
    return None


def quickness(run: ParadigmRun) -> float | None:
    """Return 1 / time to the target. A run that missed it counts with its end, a lower bound;
    omitting it would favor its kind."""
    taken_s = run.seconds if run.target_s is None else run.target_s
    return 1 / taken_s if taken_s else None


def compare(
    runs: Sequence[ParadigmRun], figure: Callable[[ParadigmRun], float | None], *, base: str
) -> list[Compared]:
    """Compare entrants with the baseline of the same seed."""
    by_seed: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        value = figure(run)
        if value is not None:
            by_seed[run.cell.entrant][run.cell.seed] = value
    compared = []
    for entrant, values in by_seed.items():
        both = [seed for seed in values if by_seed.get(base, {}).get(seed)]
        logs = [math.log(values[seed] / by_seed[base][seed]) for seed in both]
        if logs:
            compared.append(
                Compared(
                    entrant=entrant,
                    base=base,
                    mean=math.fsum(values.values()) / len(values),
                    ratio=math.exp(math.fsum(logs) / len(logs)),
                    low=math.exp(min(logs)),
                    high=math.exp(max(logs)),
                    seeds=len(logs),
                    interval=_exponents(interval_95(logs)),
                )
            )
    return compared


def _exponents(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))


def interval_95(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of a mean by Student's t: ``interval_95([2.02, 2.31])`` is about
    (0.32, 4.01)."""
    if len(values) < 2:
        return None
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * stdev(values) / math.sqrt(len(values))
    mean = math.fsum(values) / len(values)
    return mean - half, mean + half


def spans_of(bus: Bus, topics: Topics, begin: int, end: int) -> Mapping[int, list[Span]]:
    """Return stays in slots by incarnation."""
    spans: dict[int, list[Span]] = defaultdict(list)
    for record in records_of(bus, horizon_of(bus, topics).trajectories):
        for segment in decode_trajectory(record.value).segments:
            start, stop = max(begin, segment.start_ns), min(end, segment.end_ns)
            if segment.kind == "model" and stop > start:
                spans[segment.incarnation].append((start, stop))
    return spans


def _mean_of(counts: Mapping[int, int]) -> float:
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / max(1, total)
