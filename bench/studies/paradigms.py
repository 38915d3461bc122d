"""Figures of finished runs that are to be compared, each from the run's own log; decides nothing.

Times are of the run's log, from `run started` to the commit of the last step. `target_s` is when
the isotonic regression of the rewards comes to the target: of evaluations that scatter, the first
one above it would be the luckiest.
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
from dora_pipe.audit.reading import horizon_of, records_of
from dora_pipe.bus.port import Bus
from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_trajectory

BASES: Final = ("sync", "one-step", "dora")
"""What the others are compared with."""

T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
"""Quantiles .975 of Student's t by degrees of freedom from 1; the last serves for more."""

STEPS: Final = "select committed_ns, trajectories, compute_s from steps order by step"

EVALUATED: Final = """
    select version, avg(trajectories.reward),
           count(distinct group_id) filter (where groups.fate <> 'open')
    from trajectories join groups using (group_id)
    where purpose = 'eval' group by version order by version"""

Span = tuple[int, int]
"""[start, end) in ns."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """A run of the study: an entrant (see `entrants`), how it is set, and a seed."""

    entrant: str
    batches: float
    """C: batches in flight."""
    learning_rate: float
    filtered: bool
    """Whether groups without an advantage are replaced."""
    seed: int

    def __str__(self) -> str:
        kept = "" if self.filtered else ", no filter"
        return (
            f"{self.entrant}, C {self.batches:g}, learning rate {self.learning_rate:g}{kept},"
            f" seed {self.seed}"
        )


class ParadigmRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run; shares are of its whole time."""

    setting: str
    """Digest of all that must be equal in cells that are compared."""
    cell: Cell
    steps: int
    seconds: float
    samples_per_s: float
    """Trained trajectories."""
    target_s: float | None
    """Time to the evaluation reward aimed at; None if it was not reached."""
    course: tuple[tuple[float, float], ...]
    """Every evaluation: when its version was committed, s, and its mean reward."""
    reward: float
    """Of the last evaluation."""
    slots_busy: float
    """Share of all slots in use, on average."""
    training: float
    """Share of the time in which the trainer computed; the rest it waited, read or published."""
    staleness: float
    """Mean of trained groups, by the version at dispatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A figure of an entrant: mean over seeds, and as a ratio to the base with its spread."""

    entrant: str
    base: str
    mean: float
    ratio: float
    """Geometric mean over seeds of the ratio to the base with the same seed."""
    low: float
    high: float
    seeds: int
    """Pairs that the ratio is a mean of."""
    interval: tuple[float, float] | None
    """95 % interval of that mean, by Student's t over the pairs' logarithms; None for one pair."""

    @property
    def told_apart(self) -> bool:
        """Whether the interval leaves out 1: else this says neither faster nor slower."""
        return self.interval is not None and not self.interval[0] <= 1.0 <= self.interval[1]


def measure_run(
    bus: Bus, topics: Topics, *, cell: Cell, setting: str, target: float
) -> ParadigmRun:
    """The figures of a run up to its last commit. Raises InvariantBroken unless its audit is
    clean."""
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
    slots = sum(slots_of[epoch] for epoch in spans)
    course = tuple(  # version v is there from the commit of step v - 1
        ((steps[version - 1]["committed_ns"] - begin) / 1e9 if version else 0.0, reward)
        for version, reward in rewards
    )
    busy_s = sum(stop - start for found in spans.values() for start, stop in found) / 1e9
    return ParadigmRun(
        setting=setting,
        cell=cell,
        steps=len(steps),
        seconds=seconds,
        samples_per_s=sum(one["trajectories"] for one in steps) / seconds,
        target_s=crossing(isotonic(course), target),
        course=course,
        reward=course[-1][1] if course else 0.0,
        slots_busy=busy_s / (seconds * max(1, slots)),
        training=sum(one["compute_s"] for one in steps) / seconds,
        staleness=_mean_of(report.staleness),
    )


def evaluated(tables: Catalogue) -> list[tuple[int, float]]:
    """(version, mean reward) of every evaluation that has ended; all have as many groups."""
    found = tables.query(EVALUATED)
    whole = max((groups for _, _, groups in found), default=0)
    return [(version, reward) for version, reward, groups in found if whole and groups == whole]


def isotonic(course: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The isotonic regression of a course: the rewards that never fall and are nearest to it in
    the least squares, by pooling adjacent violators (Barlow et al. 1972).

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
    """When a course of (seconds, reward) first comes to `target`; None if it never does.

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
    """1 / time to the target. A run that never came to it counts as if it had at its end: that is
    the least it would have taken, and to leave it out would flatter its kind."""
    taken_s = run.seconds if run.target_s is None else run.target_s
    return 1 / taken_s if taken_s else None


def compare(
    runs: Sequence[ParadigmRun], figure: Callable[[ParadigmRun], float | None], *, base: str
) -> list[Compared]:
    """A figure by entrant, beside the base with the same seed; runs without it are left out."""
    by_seed: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        value = figure(run)
        if value is not None:
            by_seed[run.cell.entrant][run.cell.seed] = value
    found = []
    for entrant, values in by_seed.items():
        both = [seed for seed in values if by_seed.get(base, {}).get(seed)]
        logs = [math.log(values[seed] / by_seed[base][seed]) for seed in both]
        if logs:
            found.append(
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
    return found


def _exponents(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))


def interval_95(values: Sequence[float]) -> tuple[float, float] | None:
    """95 % interval of a mean by Student's t; None for fewer than two values.

    Example: ``interval_95([2.02, 2.31])`` is about (0.32, 4.01)
    """
    if len(values) < 2:
        return None
    half = T_975[min(len(values) - 1, len(T_975)) - 1] * stdev(values) / math.sqrt(len(values))
    mean = math.fsum(values) / len(values)
    return mean - half, mean + half


def spans_of(bus: Bus, topics: Topics, begin: int, end: int) -> Mapping[int, list[Span]]:
    """By role epoch: when requests were in a slot, every stay by itself, within the given time."""
    found: dict[int, list[Span]] = defaultdict(list)
    for record in records_of(bus, horizon_of(bus, topics).trajectories):
        for segment in decode_trajectory(record.value).segments:
            start, stop = max(begin, segment.start_ns), min(end, segment.end_ns)
            if segment.kind == "model" and stop > start:
                found[segment.epoch].append((start, stop))
    return found


def _mean_of(counts: Mapping[int, int]) -> float:
    total = sum(counts.values())
    return sum(value * count for value, count in counts.items()) / max(1, total)
