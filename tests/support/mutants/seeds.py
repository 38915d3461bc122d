"""Seeds that can trigger a mutant: the one that did last, then all others that may."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from dora_pipe.config.model import Config
from dora_pipe.config.retention import full_every
from dora_pipe.sim.scenario import Scenario, draw
from tests.support.mutants.colocated import OF_COLOCATED
from tests.support.mutants.sessions import OF_EPISODES, OF_SESSIONS
from tests.support.tidy import ROOT

TABLE: Final = ROOT / "bench/results/simulator/planted-bugs.csv"
"""A seed that detects each bug. A changed simulator may need others."""

Meets = Callable[[Scenario], bool]


def _of(has: Callable[[Config], bool]) -> Meets:
    return lambda drawn: has(drawn.config)


def _under(*faults: str) -> Meets:
    return lambda drawn: not drawn.faults.keys().isdisjoint(faults)


def _both(first: Meets, other: Meets) -> Meets:
    return lambda drawn: first(drawn) and other(drawn)


_PARTS: Final = _of(lambda config: config.trainer.batch_parts > 1)
_SPARES: Final = _of(lambda config: config.rollout.group_redundancy > 0)
_TIMED: Final = _of(lambda config: config.rollout.group_timeout_s is not None)
_TOGETHER: Final = _of(lambda config: any(use.group for one in config.tasks for use in one.rewards))
_DELETES: Final = _of(lambda config: config.store.keep_every not in (0, "auto"))

_DELTAS: Final = _of(lambda config: full_every(config, "float32") > 1)

_MEETS: Final[dict[str, Meets]] = {
    **{
        name: _of(lambda config: any(one.has_agent for one in config.tasks))
        for name, _, _ in OF_SESSIONS
    },
    **{name: lambda drawn: drawn.replayable for name, _, _ in OF_EPISODES},
    **{
        name: lambda drawn: any(one.colocated for one in drawn.workers[: drawn.first])
        for name, _, _ in OF_COLOCATED
    },
    "part-too-soon": _PARTS,
    "part-lost": _PARTS,
    "part-twice": _PARTS,
    "part-outlives": _both(_PARTS, _under("command-fail-batch")),
    "update-while-written": _of(lambda config: config.trainer.minibatches > 1),
    "beyond-c": _of(lambda config: config.staleness.async_batches == "auto"),
    "spares-awaited": _SPARES,
    "redundant-trained": _SPARES,
    "expired-fails": _TIMED,
    "expires-early": _TIMED,
    "old-scores-count": _TOGETHER,
    "alone-trained": _TOGETHER,
    "counted-at-once": _of(
        lambda config: any(task.max_solve_rate and not task.sampler for task in config.tasks)
    ),
    "weights-stay": _of(lambda config: any(one.sampler for one in config.tasks)),
    "base-dropped": _both(_DELTAS, _DELETES),
    "any-base": _DELTAS,
    "damaged-stays": _under("delta-damaged"),
    "pins-forgotten": _DELETES,
    "served-not-pinned": _DELETES,
    "leaving-counts": _under("terminate", "drain"),
    "unknown-is-done": _under("append-unknown", "append-torn", "kill-appending"),
    "restart-forgets": _under("kill-orchestrator", "kill-appending", "zombie-orchestrator"),
    "commit-again": _under("kill-trainer", "kill-appending", "zombie-trainer"),
}
"""Predicates by bug; other bugs can occur in every seed."""


def recorded_seeds() -> dict[str, int]:
    with TABLE.open(newline="") as file:
        return {row["bug"]: int(row["seed"]) for row in csv.DictReader(file)}


def seeds_of(bug: str, most: int) -> Iterator[int]:
    """Yield the recorded seed of a bug, then each below `most` in which the bug can occur."""
    recorded = recorded_seeds().get(bug)
    meets = _MEETS.get(bug)
    candidates = (
        seed for seed in range(most) if seed != recorded and (meets is None or meets(draw(seed)))
    )
    return chain(() if recorded is None else (recorded,), candidates)
