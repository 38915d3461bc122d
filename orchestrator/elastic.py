"""Decides when workers that share their GPUs with the trainer stand back, and when they come back.

A step stands while a batch may be taken and while one is trained. As long as it does, an elastic
worker is assigned nothing; one that hosts a version is told to sleep (`assign` of version -1), and
what it has is let go of and queues, or is finished where it cannot move. The batch is taken when
all of them have said that they sleep, so that the trainer begins on GPUs that nobody else uses and
need not know of them. When the step is committed, and no batch stands ready behind it, they are
idle workers like any other that hosts nothing.

What U may hold, and which batch may be taken, is untouched: a batch that waits is taken later, and
until then is made anew of what has finished. Nothing waits for an elastic worker but that, and it
has no request that does not end, move or get lost with it; see docs/scheduling.md.
"""

from __future__ import annotations

from dora_pipe.orchestrator.staleness import next_batch
from dora_pipe.orchestrator.state import State, Worker
from dora_pipe.schemas.rounds import NO_VERSION, Assign


def batch_due(state: State) -> list[str]:
    """The groups of the next batch, those of its parts first; none where the trainer waits."""
    at, held = state.standing(), state.in_parts
    rest = next_batch(
        state.finished, state.deadlines, step=at.step, per_step=at.per_step, taken=len(held)
    )
    return [*held, *(one.group for one in rest)] if rest else []


def step_stands(state: State) -> bool:
    """Whether a batch is trained, or may be taken."""
    at = state.standing()
    return at.training or (at.step < at.steps and bool(batch_due(state)))


def awaited(state: State) -> list[str]:
    """The elastic workers that do not sleep, by name: no batch is taken before they do."""
    return sorted(name for name, one in state.index.elastic.items() if one.awake)


def held(state: State) -> frozenset[str]:
    """The names of the workers that may be assigned nothing now."""
    found = state.index.elastic
    return frozenset(found) if found and step_stands(state) else frozenset()


def to_sleep(state: State) -> list[Worker]:
    """Those that are told to sleep now, by name. A worker that loads is told when it has loaded."""
    return [
        worker
        for name in sorted(held(state))
        if (worker := state.index.elastic[name]).usable
        and not worker.loading
        and worker.target != NO_VERSION
    ]


def assign_error(state: State, worker: Worker, decision: Assign) -> str:
    """Why a worker must not be told to sleep, or be assigned a version; empty if it may."""
    if decision.version != NO_VERSION:
        held = worker.elastic and step_stands(state)
        return f"{worker.name} sleeps while a step is computed" if held else ""
    if not worker.elastic:
        return f"{worker.name} is not elastic"
    if worker.target == NO_VERSION or decision.digest or decision.drop:
        return f"{worker.name} sleeps already, or is told more than that"
    return "" if step_stands(state) else f"{worker.name} has to sleep for no step"


def letting_go(state: State) -> list[Worker]:
    """Workers that are to sleep and have requests, by name."""
    if not state.index.elastic:
        return []
    found = state.index.hosts.get(NO_VERSION)
    if found is None:
        return []
    return [one for name, one in sorted(found.workers.items()) if one.requests and one.moves]
