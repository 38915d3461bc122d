"""Mutants of colocated workers; see `rules`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dora_pipe.orchestrator import colocated
from dora_pipe.orchestrator.state import State

if TYPE_CHECKING:
    from tests.support.mutants.rules import Patches


def _never_given_back(patches: Patches) -> None:
    patches.everywhere(colocated.held, lambda state: frozenset(state.index.colocated))


def _woken_in_a_step(patches: Patches) -> None:
    right = colocated.held

    def held(state: State) -> frozenset[str]:
        return frozenset() if state.training is not None else right(state)

    patches.everywhere(right, held)
    _allow(patches)


def _taken_while_awake(patches: Patches) -> None:
    patches.everywhere(colocated.awaited, lambda state: [])


def _allow(patches: Patches) -> None:
    patches.put(colocated, "assign_error", lambda state, worker, decision: "")


OF_COLOCATED: Final = (
    ("never-given-back", "an colocated worker that has slept gets nothing more", _never_given_back),
    ("woken-in-a-step", "an colocated worker is assigned a version in a step", _woken_in_a_step),
    ("taken-while-awake", "a batch does not wait for colocated workers", _taken_while_awake),
)
"""(name, description, patch)."""
