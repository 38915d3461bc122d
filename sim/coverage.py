"""What many seeds have met between them, and what none has; decides what there is to meet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, get_args

from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import AnyDecision, AnyObservation, Fate
from dora_pipe.sim.scenario import FAULTS
from dora_pipe.sim.seed_runner import SeedResult

NOT_HERE: Final = frozenset(
    {
        "control weights-adopted",  # another machine's numerics: here all are one
        "control batch-refused",  # bytes of the log do not change here
        "control versions-dropped",  # said by `prune` when a run is over
        "observed kv-pressure",  # the simulated engine keeps no cache
        "observed placeable",
    }
)
"""Kinds that no seed can meet."""


def _tags(union: Any, prefix: str) -> list[str]:
    return [f"{prefix} {kind.__struct_config__.tag}" for kind in get_args(union)]


_STATES: Final = (
    *(f"fact {name}" for name in ("bound", "superseded", "fenced", "failed", "released")),
    *(f"group {fate}" for fate in get_args(Fate)),
    *(f"worker {how}" for how in ("left", "fenced", "replaced", "there")),
    *(f"staleness {number}" for number in range(4)),
    *(f"worker: {how}" for how in ("left", "fenced", "replaced", "failed", "killed")),
    *(f"orchestrator: {how}" for how in ("ended", "killed", "Fenced", "OutcomeUnknown")),
    *(f"trainer: {how}" for how in ("ended", "killed", "Fenced", "OutcomeUnknown")),
    *(
        f"trainer {phase}"
        for phase in ("restoring", "idle", "reading", "training", "publishing", "committing")
    ),
)

EXPECTED: Final[dict[str, tuple[str, ...]]] = {
    "faults": tuple(FAULTS),
    "decisions": tuple(_tags(AnyDecision, "decided")),
    "records": tuple(_tags(AnyControl, "control")),
    "observations": tuple(_tags(AnyObservation, "observed")),
    "states": _STATES,
}
"""What there is to meet, by sort."""


@dataclass(slots=True)
class Coverage:
    """Counts over seeds; ``for played in ...: coverage.add(played)``."""

    seeds: int = 0
    events: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    virtual_s: float = 0.0
    met: Counter[str] = field(default_factory=Counter)
    seeds_of: Counter[str] = field(default_factory=Counter)
    """Seeds that have met it at least once."""
    broken: list[SeedResult] = field(default_factory=list)

    def add(self, played: SeedResult) -> None:
        """One more seed."""
        self.seeds += 1
        self.events.append(played.events)
        self.faults.append(played.faults.total())
        self.steps.append(played.steps)
        self.virtual_s += played.virtual_s
        for counter in (played.faults, played.kinds, played.states):
            self.met.update(counter)
            self.seeds_of.update(name for name, count in counter.items() if count)
        if not played.holds:
            self.broken.append(played)

    def rows(self) -> Iterator[tuple[str, str, int, int]]:
        """(sort, what, how often, in how many seeds) of everything expected."""
        for sort, names in EXPECTED.items():
            for name in names:
                if name not in NOT_HERE:
                    yield sort, name, self.met[name], self.seeds_of[name]

    def unmet(self) -> Sequence[str]:
        """What no seed has met, although one could."""
        return [name for _, name, count, _ in self.rows() if not count]
