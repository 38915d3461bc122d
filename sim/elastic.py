"""Which workers of a seed share their GPUs with the trainer; and mutant bugs of such workers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final

from dora_pipe.orchestrator import elastic
from dora_pipe.orchestrator.state import State
from dora_pipe.sim.parts import WorkerPlan

if TYPE_CHECKING:
    from dora_pipe.sim.mutants import Patches

ELASTIC_SHARE: Final = 0.2
"""Of seeds in `swarm` some of whose workers sleep while a step is computed."""


def with_elastic(seed: int, plans: tuple[WorkerPlan, ...]) -> tuple[WorkerPlan, ...]:
    """The same workers, and in some seeds all of them, or every other one, elastic, where they host
    one version at a time; drawn apart."""
    chance = Random(f"dora-pipe sim elastic {seed}")
    if chance.random() >= ELASTIC_SHARE:
        return plans
    every = chance.choice((1, 2))
    return tuple(
        replace(plan, elastic=plan.versions == 1 and not place % every)
        for place, plan in enumerate(plans)
    )


def _never_given_back(patches: Patches) -> None:
    patches.everywhere(elastic.held, lambda state: frozenset(state.index.elastic))


def _woken_in_a_step(patches: Patches) -> None:
    """What sleeps is idle like any other while the trainer computes."""
    right = elastic.held

    def held(state: State) -> frozenset[str]:
        return frozenset() if state.training is not None else right(state)

    patches.everywhere(right, held)
    _allow(patches)


def _taken_while_awake(patches: Patches) -> None:
    patches.everywhere(elastic.awaited, lambda state: [])


def _allow(patches: Patches) -> None:
    """The fold believes whatever is assigned."""
    patches.put(elastic, "assign_error", lambda state, worker, decision: "")


OF_ELASTIC: Final = (
    ("never-given-back", "an elastic worker that has slept gets nothing more", _never_given_back),
    ("woken-in-a-step", "an elastic worker is assigned a version in a step", _woken_in_a_step),
    ("taken-while-awake", "a batch does not wait for elastic workers", _taken_while_awake),
)
"""(name, what is wrong, how it is put there) of each."""
