"""Sleep and wake-up of workers colocated with the trainer (docs/staleness.md).

While a batch may be taken or is training, colocated workers get no version; hosts are assigned
version -1 (sleep), and their requests move or finish. The batch is taken once all of them sleep.
After the commit they are ordinary idle workers.
"""

from __future__ import annotations

from dora_pipe.orchestrator.entities import Worker
from dora_pipe.orchestrator.staleness import next_batch
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.rounds import NO_VERSION, Assign


def batch_due(state: State) -> list[str]:
    """Return the next batch's groups, parts first; empty if the trainer must wait."""
    standing, held = state.standing(), state.in_parts
    rest = next_batch(
        state.finished,
        state.deadlines,
        step=standing.step,
        per_step=standing.per_step,
        taken=len(held),
    )
    return [*held, *(group.group for group in rest)] if rest else []


def step_is_ready(state: State) -> bool:
    """Report whether a batch is training or may be taken."""
    standing = state.standing()
    return standing.training or (standing.step < standing.steps and bool(batch_due(state)))


def awaited(state: State) -> list[str]:
    """Return colocated workers still awake."""
    return sorted(name for name, worker in state.index.colocated.items() if worker.awake)


def held(state: State) -> frozenset[str]:
    """Return workers that may not be assigned now."""
    workers = state.index.colocated
    return frozenset(workers) if workers and step_is_ready(state) else frozenset()


def to_sleep(state: State) -> list[Worker]:
    """Return workers to put to sleep; loading ones wait."""
    return [
        worker
        for name in sorted(held(state))
        if (worker := state.index.colocated[name]).usable
        and not worker.loading
        and worker.target != NO_VERSION
    ]


def assign_error(state: State, worker: Worker, decision: Assign) -> str:
    """Return why an assignment is illegal; empty if legal."""
    if decision.version != NO_VERSION:
        held = worker.colocated and step_is_ready(state)
        return f"{worker.name} sleeps while a step is computed" if held else ""
    if not worker.colocated:
        return f"{worker.name} is not colocated"
    if worker.target == NO_VERSION or decision.digest or decision.drop:
        return f"{worker.name} already sleeps, or the decision has more fields"
    return "" if step_is_ready(state) else f"{worker.name} sleeps without a step to train"


def emptying_before_sleep(state: State) -> list[Worker]:
    """Return workers with requests that are to sleep."""
    if not state.index.colocated:
        return []
    asleep = state.index.hosts.get(NO_VERSION)
    if asleep is None:
        return []
    return [
        worker
        for name, worker in sorted(asleep.workers.items())
        if worker.requests and worker.moves
    ]
