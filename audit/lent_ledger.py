"""Books of groups that a run borrows: those of the run that sampled them, with what became of them
here.
"""

from __future__ import annotations

import msgspec

from dora_pipe.audit.auditor import build_ledger
from dora_pipe.audit.entries import GroupEntry, RequestEntry, StepEntry
from dora_pipe.audit.ledger import Ledger
from dora_pipe.bus.port import Bus
from dora_pipe.consumers.trainer.change_file import stored_change
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.schemas.batch import parts_of
from dora_pipe.schemas.topics import Topics
from dora_pipe.store.store import PolicyStore


def lender_of(bus: Bus, ledger: Ledger, store: PolicyStore) -> Ledger | None:
    """The books of the run whose groups this one has trained, which are booked here too; None for a
    run with groups of its own. Raises PolicyError where it is not known what of them counts."""
    retrained = None if ledger.started is None else ledger.started.retrained
    if retrained is None:
        return None
    lender = build_ledger(bus, Topics(retrained.run))
    borrow(ledger, lender, stored_change(store, retrained.change))
    return lender


def borrow(ledger: Ledger, lender: Ledger, change: BatchChange) -> None:
    """Book the groups of a retrained run's steps, and who sampled them."""
    for entry in ledger.steps.values():
        parts = parts_of(entry.fact.groups, entry.fact.parts)
        for part, groups in enumerate(parts, 1):
            for taken in groups:
                found = lender.accounts.groups.get(taken.group)
                if found is not None:
                    at = part if entry.fact.parts else 0
                    ledger.accounts.groups[taken.group] = _here(found, entry, change, at)
    for epoch, worker in lender.accounts.workers.items():
        ledger.accounts.workers.setdefault(epoch, worker)


def _here(group: GroupEntry, entry: StepEntry, change: BatchChange, part: int) -> GroupEntry:
    step, attempt = entry.fact.step, entry.fact.attempt
    out = group.spec.group in change.without
    requests = {name: _counted(one, name, change) for name, one in group.requests.items()}
    same = all(one is group.requests[name] for name, one in requests.items())
    return msgspec.structs.replace(
        group,
        requests=requests,
        scoring=group.scoring if same else None,
        taken=None if out else (step, attempt),
        fate="filtered" if out else "trained",
        why=f"left out of step {step}" if out else f"batch of step {step}, attempt {attempt}",
        step=None if out else step,
        ended=entry.at,
        part=part,
    )


def _counted(request: RequestEntry, name: str, change: BatchChange) -> RequestEntry:
    """With the reward that counts; the very same one where that is its own."""
    bound = request.bound
    if bound is None:
        return request
    reward = None if name in change.without else change.rewards.get(name, bound.fact.reward)
    if reward == bound.fact.reward:
        return request
    fact = msgspec.structs.replace(bound.fact, reward=reward)
    return msgspec.structs.replace(request, bound=msgspec.structs.replace(bound, fact=fact))
