"""The paradigms of `bench paradigms`, and what each is set to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from dora_pipe.bench.studies.paradigms import Cell

PARTS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """A paradigm as it takes part."""

    name: str
    max_staleness: int
    batches: float
    """C."""
    filtered: bool = True
    """Whether groups without an advantage are replaced; a synchronous step waits for those."""
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
        Entrant(name="sync", max_staleness=0, batches=1.0, together=True),
        Entrant(name="one-step", max_staleness=1, batches=2.0),
        Entrant(name="dora", max_staleness=2, batches=3.0),
        Entrant(name="dora-parts", max_staleness=2, batches=3.0, parts=PARTS),
        Entrant(name="elastic", max_staleness=2, batches=3.0, elastic=1),
        Entrant(name="interruptible", max_staleness=2, batches=3.0, interruptible=True),
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


def own_setting(name: str, rate: float) -> Cell:
    """What an entrant is set to, with no seed."""
    entrant = ENTRANTS[name]
    return Cell(
        entrant=name,
        batches=entrant.batches,
        learning_rate=rate,
        filtered=entrant.filtered,
        seed=-1,
    )


def reported(chosen: Sequence[Cell], seeds: int) -> list[Cell]:
    """The cells that are compared, seed by seed; who is first changes, for machines warm up."""
    return [
        msgspec.structs.replace(chosen[(at + seed) % len(chosen)], seed=seed)
        for seed in range(seeds)
        for at in range(len(chosen))
    ]
