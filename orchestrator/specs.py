"""Decides what a dispatch stamps on the next group, and which versions a batch names as pinned."""

from __future__ import annotations

from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.identity import group_id, group_seed, partition_of, prompt_index
from dora_pipe.schemas.rounds import GroupSpec

EVALUATION_DEADLINE = -1
"""Evaluation groups are outside U and have no deadline."""


def pinned(state: State) -> tuple[int, ...]:
    """Versions that must stay in the store: open groups carry them, or workers have them."""
    workers = state.workers.values()
    held = {one.target for one in workers} | {one.hosted for one in workers}
    held.update(version for one in state.residents.values() for version in one.held)
    return tuple(sorted(version for version in held | state.pins.keys() if version >= 0))


def train_spec(state: State) -> GroupSpec:
    """The next training group: newest version, next prompt in the order of the run's seed."""
    assert state.facts is not None and state.config is not None
    ordinal, facts = state.ordinal, state.facts
    data_epoch, index = prompt_index(facts.seed, ordinal, facts.dataset_rows)
    return GroupSpec(
        group=group_id("train", ordinal),
        ordinal=ordinal,
        purpose="train",
        version=state.version,
        digest=state.policies[state.version],
        deadline=state.standing().deadline,
        partition=partition_of(ordinal, state.config.bus.partitions),
        dataset_digest=facts.dataset_digest,
        index=index,
        data_epoch=data_epoch,
        seed=group_seed(facts.seed, "train", ordinal),
        size=state.config.groups.size,
    )


def eval_spec(state: State) -> GroupSpec:
    """The next row of the evaluation of the newest version; seeds depend on the row alone."""
    assert state.facts is not None and state.config is not None
    ordinal, row = state.eval_ordinal, state.eval_row
    return GroupSpec(
        group=group_id("eval", ordinal),
        ordinal=ordinal,
        purpose="eval",
        version=state.version,
        digest=state.policies[state.version],
        deadline=EVALUATION_DEADLINE,
        partition=partition_of(ordinal, state.config.bus.partitions),
        dataset_digest=state.facts.eval_digest,
        index=row,
        data_epoch=0,
        seed=group_seed(state.facts.seed, "eval", row),
        size=state.config.evaluation.siblings,
    )


def evaluation_rows(state: State) -> int:
    """Groups of one evaluation."""
    assert state.facts is not None and state.config is not None
    return min(state.config.evaluation.prompts, state.facts.eval_rows)


def evaluation_due(state: State) -> bool:
    """Whether the newest version is to be evaluated and has not been dispatched for it in full."""
    assert state.config is not None
    if state.version <= state.evaluated or state.stop_now or not evaluation_rows(state):
        return False
    every = state.config.evaluation.every
    periodic = every > 0 and state.version % every == 0
    return periodic or state.version in (0, state.steps)
