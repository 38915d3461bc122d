"""Decides how a modelled run is summed up: the mean step of its steady part, over seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dora_pipe.sim.modelled_cluster import ClusterRun

MINUTE_S: Final = 60.0
WARM_STEPS: Final = 4
"""The first steps of a run are not counted: everything starts at once."""
END_STEPS: Final = 3
"""Nor are the last: fewer and fewer groups are in flight, because the run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The steady part of one run; minutes."""

    step_min: float
    train_min: float
    tokens_s: float
    staleness: Mapping[int, float]
    """Share of groups (or samples) by staleness."""
    slots_used: float
    """Share of slots with a request, over the whole run."""
    moves_share: float
    """Moves per request."""
    loads_step: float
    """Weights loaded per step and worker."""

    @property
    def exposed_min(self) -> float:
        """Time of a step in which nobody trains: the published "rollout-only" time."""
        return self.step_min - self.train_min

    @property
    def staleness_mean(self) -> float:
        """Mean over groups."""
        return sum(staleness * share for staleness, share in self.staleness.items())


def figures_of_run(run: ClusterRun) -> Figures:
    """Sum up one run of more than `WARM_STEPS + END_STEPS` steps."""
    spans = run.spans
    assert len(spans) > WARM_STEPS + END_STEPS, f"{len(spans)} steps are too few"
    steady = spans[WARM_STEPS:-END_STEPS]
    wall_s = steady[-1].committed_s - spans[WARM_STEPS - 1].committed_s
    staleness: Counter[int] = Counter()
    for span in steady:
        staleness.update(dict(span.staleness))
    return Figures(
        step_min=wall_s / len(steady) / MINUTE_S,
        train_min=sum(one.committed_s - one.taken_s for one in steady) / len(steady) / MINUTE_S,
        tokens_s=sum(one.tokens for one in steady) / wall_s,
        staleness={one: staleness[one] / staleness.total() for one in sorted(staleness)},
        slots_used=run.slot_s / run.slots / run.wall_s,
        moves_share=run.moves / max(1, run.requests),
        loads_step=run.loads / run.workers / len(spans),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeds:
    """The same row under several seeds."""

    runs: Sequence[Figures]

    def mean(self, what: Callable[[Figures], float]) -> float:
        """Over seeds."""
        return sum(map(what, self.runs)) / len(self.runs)

    def spread(self, what: Callable[[Figures], float]) -> float:
        """Half of the distance between the largest and the smallest."""
        found = [what(one) for one in self.runs]
        return (max(found) - min(found)) / 2

    def staleness(self) -> dict[int, float]:
        """Mean histogram."""
        found: dict[int, float] = {}
        for one in self.runs:
            for key, share in one.staleness.items():
                found[key] = found.get(key, 0.0) + share
        return {key: found[key] / len(self.runs) for key in sorted(found)}


def overlap(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Shared mass of two histograms, 1 for equal ones."""
    return sum(min(one.get(key, 0.0), other.get(key, 0.0)) for key in {*one, *other})
