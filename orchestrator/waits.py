"""Says in words what a run waits for; it decides nothing."""

from __future__ import annotations

from typing import Final

from dora_pipe.orchestrator.staleness import waits_until
from dora_pipe.orchestrator.state import Group, State

NAMED_MAX: Final = 3
"""Groups that a sentence names; the others are counted."""


def waits_for(state: State) -> str:
    """One line; empty when the run is over."""
    if state.facts is None:
        return "the start of the run"
    if state.done:
        return ""
    if state.training is not None:
        return f"the trainer: step {state.training.step}, attempt {state.training.attempt}"
    if not any(worker.usable for worker in state.workers.values()):
        return f"a worker{_rejection(state)}"
    found = blockers(state)
    if not found:
        return "the end of a pause" if state.paused else "new groups"
    names = ", ".join(_words(state, group) for group in found[:NAMED_MAX])
    more = len(found) - NAMED_MAX
    return f"groups {names}" + (f" and {more} more" if more > 0 else "")


def blockers(state: State) -> list[Group]:
    """The unfinished groups that the next step waits for, earliest deadline first.

    At the end of the run: the evaluation groups that are open.
    """
    at = state.standing()
    if at.step >= at.steps:
        return sorted(state.groups.values(), key=lambda group: group.key)
    until = waits_until(state.finished, state.deadlines, step=at.step, per_step=at.per_step)
    found = [
        group
        for group in state.groups.values()
        if group.phase == "generating"
        and group.spec.purpose == "train"
        and (until is None or group.spec.deadline <= until)
    ]
    return sorted(found, key=lambda group: group.key)


def _words(state: State, group: Group) -> str:
    left = group.spec.size - group.ended
    return f"{group.spec.group} (version {group.spec.version}, {left} of {group.spec.size} open)"


def _rejection(state: State) -> str:
    return f" (rejected: {state.tally.rejection})" if state.tally.rejection else ""
