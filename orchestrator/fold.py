"""Fold of a run's rounds into the state.

1. A round applies control records below its `control_next`, observations, decisions, then its own
   fields.
2. The chain covers every byte of control records and rounds.
3. Control records never stop a fold. A round out of order, an illegal decision, a wrong chain or
   digest raises InvariantBroken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.orchestrator import colocated
from dora_pipe.orchestrator.apply_control import apply_control, read_control
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.planner import is_cut
from dora_pipe.orchestrator.staleness import admissible
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.state_ops import expire, note_off_engine, note_progress, press
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import (
    STATE_DIGEST_EVERY,
    AnyObservation,
    GroupExpired,
    KvPressure,
    OffEngine,
    PlanPeriod,
    Progressed,
    Round,
    chain_of,
    fold_bytes,
)
from dora_pipe.schemas.wire import Unknown


def apply_observation(state: State, observation: AnyObservation) -> None:
    """Fold one observation; ignore it if its subject is gone."""
    if isinstance(observation, PlanPeriod):
        state.trigger = "the planning period has passed"
    elif isinstance(observation, Progressed):
        if observation.trajectory in state.requests:
            note_progress(state, observation.trajectory, observation.resume)
    elif isinstance(observation, GroupExpired):
        group = state.groups.get(observation.group)
        if group is not None and group.phase == "generating":
            expire(state, group)
    else:
        worker = state.worker_of(observation.worker, observation.incarnation)
        if worker is None:
            return
        if isinstance(observation, KvPressure):
            press(state, worker, observation.used_tokens)
        elif isinstance(observation, OffEngine):
            note_off_engine(state, worker, observation.requests)
        else:
            worker.silent = True
            state.touch(worker)


def fold_round(state: State, round_: Round, control: Sequence[tuple[int, bytes]]) -> None:
    """Apply a round with its control records, as (offset, value bytes).

    Raises InvariantBroken; the state is then unusable.
    """
    fold_records(state, round_, [(offset, read_control(value)) for offset, value in control])
    fold_decisions(state, round_)
    folded = b"".join(fold_bytes(offset, value) for offset, value in control)
    if chain_of(state.chain, folded, round_) != round_.chain:
        raise InvariantBroken(
            f"round {round_.ordinal}: its chain digest does not match the folded records"
        )
    state.chain = round_.chain


def fold_records(
    state: State, round_: Round, control: Iterable[tuple[int, AnyControl | Unknown | SchemaError]]
) -> None:
    """Apply control records and observations, up to the state of the plan."""
    _check_follows(state, round_)
    first = state.control_next
    for offset, record in control:
        if not first <= offset < round_.control_next:
            raise InvariantBroken(f"round {round_.ordinal} does not fold offset {offset}")
        apply_control(state, offset, record)
        first = offset + 1
    for observation in round_.observations:
        apply_observation(state, observation)
    state.now_ns = round_.now_ns


def fold_decisions(state: State, round_: Round) -> None:
    """Apply decisions and the round's fields."""
    for decision in round_.decisions:
        try:
            apply_decision(state, decision)
        except InvariantBroken as error:
            raise InvariantBroken(f"round {round_.ordinal}: {error.message}") from None
    close_round(state, round_)
    check_digest(state, round_)


def check_digest(state: State, round_: Round) -> None:
    """Check the state digest if due. Raises InvariantBroken."""
    digest = round_.state_digest
    if digest is None:
        if is_digest_due(state, round_.ordinal):
            raise InvariantBroken(f"round {round_.ordinal}: the digest of its state is missing")
        return
    if digest != state.digest():
        raise InvariantBroken(f"round {round_.ordinal}: the resulting state differs")


def capped(state: State) -> tuple[int, int]:
    """Return (slots empty because of the in-flight limit alone, all usable slots)."""
    index, newest = state.index, state.version
    slots = sum(hosts.slots for hosts in index.hosts.values())
    held = colocated.held(state)
    idle = sum(
        worker.slots
        for worker in index.idle.values()
        if worker.target != newest and worker.name not in held
    )
    empty = index.free(newest) + idle
    return (empty if empty and _only_the_limit(state) else 0), slots


def _only_the_limit(state: State) -> bool:
    if state.config is None or state.paused or state.failures.halted:
        return False
    standing = state.standing()
    if admissible(state.deadlines, standing):
        return False
    # The bound allows at most max_staleness + 1 batches.
    unlimited = dataclasses.replace(standing, async_batches=standing.max_staleness + 1.0)
    return bool(admissible(state.deadlines, unlimited))


def note_slots(state: State) -> None:
    """Count empty slots for an automatic limit."""
    if state.config is not None and (before := state.automatic) is not None:
        empty, slots = capped(state)
        state.in_flight = before.at_round(state.now_ns, empty=empty, slots=slots)


def close_round(state: State, round_: Round) -> None:
    """Store the round's fields; a complete plan clears its trigger."""
    note_slots(state)
    if round_.planned and not is_cut(round_.decisions):
        state.trigger = ""
    state.rounds = round_.ordinal + 1
    state.round_incarnation = round_.incarnation
    state.control_next = round_.control_next


def is_digest_due(state: State, ordinal: int) -> bool:
    """Report whether a round carries the digest."""
    return (ordinal + 1) % STATE_DIGEST_EVERY == 0 or state.done


def rounds_to_digest(ordinal: int) -> int:
    """Return the rounds until the next digest."""
    return STATE_DIGEST_EVERY - 1 - ordinal % STATE_DIGEST_EVERY


def _check_follows(state: State, round_: Round) -> None:
    name = f"round {round_.ordinal}"
    if round_.ordinal != state.rounds:
        raise InvariantBroken(f"{name} at the position of round {state.rounds}")
    if state.done:
        raise InvariantBroken(f"{name} after the end of the run")
    if round_.incarnation < state.round_incarnation:
        raise InvariantBroken(f"{name}: incarnation {round_.incarnation} was over")
    if round_.now_ns < state.now_ns:
        raise InvariantBroken(f"{name}: time decreases")
    if round_.control_next < state.control_next:
        raise InvariantBroken(f"{name}: position {round_.control_next} decreases")
