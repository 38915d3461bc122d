"""Paradigms of `bench paradigms`."""

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
    name: str
    max_staleness: int
    batches: float
    """Batches in flight."""
    filtered: bool = True
    """Whether groups without advantage are replaced."""
    parts: int = 1
    together: bool = False
    """Whether generation and training alternate on all devices, like the paper's synchronous
    baseline."""

    partial_rollout: bool = False
    colocated: int = 0
    """Additional workers colocated with the trainer."""

    @property
    def keys(self) -> dict[str, Any]:
        own = {"workers.colocated": self.colocated} if self.colocated else {}
        bound = {
            "staleness.max_staleness": self.max_staleness,
            "staleness.partial_rollout": self.partial_rollout,
        }
        return {**bound, "trainer.batch_parts": self.parts, **own}


ENTRANTS: Final[Mapping[str, Entrant]] = {
    one.name: one
    for one in (
        Entrant(name="sync", max_staleness=0, batches=1.0, together=True),
        Entrant(name="one-step", max_staleness=1, batches=2.0),
        Entrant(name="dora", max_staleness=2, batches=3.0),
        Entrant(name="dora-parts", max_staleness=2, batches=3.0, parts=PARTS),
        Entrant(name="colocated", max_staleness=2, batches=3.0, colocated=1),
        Entrant(name="partial_rollout", max_staleness=2, batches=3.0, partial_rollout=True),
    )
}


def overrides_of(cell: Cell) -> list[str]:
    keys = {
        "staleness.async_batches": cell.batches,
        "trainer.learning_rate": cell.learning_rate,
        "rollout.filter_zero_advantage": cell.filtered,
        "run.seed": cell.seed,
        **ENTRANTS[cell.entrant].keys,
    }
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]


def own_setting(name: str, rate: float) -> Cell:
    """Return a setting without seed."""
    entrant = ENTRANTS[name]
    return Cell(
        entrant=name,
        batches=entrant.batches,
        learning_rate=rate,
        filtered=entrant.filtered,
        seed=-1,
    )


def reported(chosen: Sequence[Cell], seeds: int) -> list[Cell]:
    """Return cells by seed, in rotating order because machines warm up."""
    return [
        msgspec.structs.replace(chosen[(index + seed) % len(chosen)], seed=seed)
        for seed in range(seeds)
        for index in range(len(chosen))
    ]
