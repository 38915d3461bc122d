"""Who takes part in `bench paradigms`, what each may be set to, and which setting is its own best.

Every entrant has a grid of as many cells as the others. What it is set to is chosen on other seeds
than those that are reported: else it would be chosen for its luck.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora_pipe.bench.studies.paradigms import Cell, ParadigmRun

CHOOSING_FROM: Final = 1000
"""The first seed of those that a setting is chosen on."""

PARTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A paradigm as it takes part."""

    name: str
    max_staleness: int
    batches: tuple[float, ...]
    """C that are tried; the first is the paradigm's own."""
    filtered: tuple[bool, ...] = (True,)
    """Whether groups without an advantage are replaced. A synchronous step waits for those that
    replace them; one that trains the batch as it is does not."""
    parts: int = 1
    together: bool = False
    """Generating and training have all devices in turn, as the paper's synchronous baseline."""

    interruptible: bool = False
    elastic: int = 0
    """Workers beside the others' that have the trainer's device while no step is computed."""

    @property
    def keys(self) -> dict[str, Any]:
        """What it sets beside its cell's keys."""
        own = {"workers.elastic": self.elastic} if self.elastic else {}
        bound = {
            "staleness.max_staleness": self.max_staleness,
            "staleness.interruptible": self.interruptible,
        }
        return {**bound, "trainer.parts": self.parts, **own}


ENTRANTS: Final[Mapping[str, Entrant]] = {
    one.name: one
    for one in (
        Entrant(
            name="sync", max_staleness=0, batches=(1.0,), filtered=(True, False), together=True
        ),
        Entrant(name="one-step", max_staleness=1, batches=(2.0, 1.5)),
        Entrant(name="dora", max_staleness=2, batches=(3.0, 2.0)),
        Entrant(name="dora-parts", max_staleness=2, batches=(3.0, 2.0), parts=PARTS),
        Entrant(name="elastic", max_staleness=2, batches=(3.0, 2.0), elastic=1),
        Entrant(name="interruptible", max_staleness=2, batches=(3.0, 2.0), interruptible=True),
    )
}


def overrides_of(cell: Cell) -> list[str]:
    """What a cell sets, as `load_config` takes it."""
    keys = {
        "staleness.in_flight_batches": cell.batches,
        "trainer.learning_rate": cell.learning_rate,
        "groups.filter_zero_advantage": cell.filtered,
        "run.seed": cell.seed,
        **ENTRANTS[cell.entrant].keys,
    }
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def settings_of(name: str, rates: Sequence[float]) -> Iterator[Cell]:
    """The grid of an entrant, with no seed: its own setting first."""
    entrant = ENTRANTS[name]
    for rate in rates:
        for batches in entrant.batches:
            for filtered in entrant.filtered:
                yield Cell(
                    entrant=name, batches=batches, learning_rate=rate, filtered=filtered, seed=-1
                )


def on_seeds(settings: Sequence[Cell], seed: int) -> list[Cell]:
    """The cells in which settings are tried for the time that is counted from 0."""
    return [msgspec.structs.replace(one, seed=CHOOSING_FROM + seed) for one in settings]


def better_half(settings: Sequence[Cell], runs: Sequence[ParadigmRun]) -> list[Cell]:
    """The better half of settings (with no seed), best first, by the least mean time to the target
    over the runs that each was tried in; one that did not reach it in a run is behind those that
    always did. Of equals the one with the higher last reward; without runs as they are.

    Successive halving (Karnin et al. 2013): what is far behind on one seed is not tried on more,
    and the seeds that are saved tell apart those that are close.
    """

    def key(setting: Cell) -> tuple[float, float]:
        mine = [run for run in runs if msgspec.structs.replace(run.cell, seed=-1) == setting]
        times = [math.inf if run.target_s is None else run.target_s for run in mine]
        mean_s = math.fsum(times) / len(times) if times else math.inf
        return mean_s, -math.fsum(run.reward for run in mine) / max(1, len(mine))

    return sorted(settings, key=key)[: math.ceil(len(settings) / 2)]


def reported(chosen: Sequence[Cell], seeds: int) -> list[Cell]:
    """The cells that are compared, seed by seed; who is first changes, for machines warm up."""
    return [
        msgspec.structs.replace(chosen[(at + seed) % len(chosen)], seed=seed)
        for seed in range(seeds)
        for at in range(len(chosen))
    ]
