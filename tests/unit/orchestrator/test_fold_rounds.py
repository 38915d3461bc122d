"""Tests that a log folds to its writer's state, and changes are detected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.fold import close_round, fold_round, is_digest_due
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Dispatch,
    Round,
    Schedule,
    ScheduledSample,
    TakeBatch,
    chain_of,
    fold_bytes,
)
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage
from tests.support.singly import as_record

Logged = list[tuple[Round, list[tuple[int, bytes]]]]


class Recorder(Stage):
    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.log: Logged = []
        self.unfolded: list[tuple[int, bytes]] = []

    def tell(self, record: Any) -> int:
        offset = super().tell(record)
        self.unfolded.append((offset, encode(as_record(record))))
        return offset

    def plan(self, *, limit: int = 1000) -> list[AnyDecision]:
        self.state.now_ns += 5
        decisions = super().plan(limit=limit)
        round_ = Round(
            ordinal=self.state.rounds,
            incarnation=0,
            now_ns=self.state.now_ns,
            control_next=self.offset,
            decisions=tuple(decisions),
        )
        close_round(self.state, round_)
        if is_digest_due(self.state, round_.ordinal):
            round_ = msgspec.structs.replace(round_, state_digest=self.state.digest())
        folded = b"".join(fold_bytes(*entry) for entry in self.unfolded)
        self.state.chain = chain_of(self.state.chain, folded, round_)
        self.log.append((msgspec.structs.replace(round_, chain=self.state.chain), self.unfolded))
        self.unfolded = []
        return decisions


def whole_run() -> Recorder:
    stage = Recorder(run__steps=2)
    stage.begin()
    stage.worker("w0", slots=4)
    stage.tell(records.failed(stage.placed["g0000000000-000"], retryable=False))
    stage.finish_all()
    stage.tell(records.refused(0, [stage.state.training.groups[0]]))  # type: ignore[union-attr]
    stage.complete()
    return stage


def fold(log: Logged) -> State:
    state = State()
    for round_, control in log:
        fold_round(state, round_, control)
    return state


def test_every_sixty_fourth_round_carries_the_digest_of_the_state() -> None:
    stage = Recorder()
    for _ in range(130):
        stage.plan()
    assert [entry.ordinal for entry, _ in stage.log if entry.state_digest] == [63, 127]
    missing = msgspec.structs.replace(stage.log[63][0], state_digest=None)
    stage.log[63] = (missing, [])
    with pytest.raises(InvariantBroken, match="round 63: the digest of its state is missing"):
        fold(stage.log)


def _damaged(position: int, change: dict[str, Any]) -> Callable[[Logged], None]:
    def damage(log: Logged) -> None:
        round_, control = log[position]
        log[position] = (msgspec.structs.replace(round_, **change), control)

    return damage


def _record_changed(log: Logged) -> None:
    for index, (round_, control) in enumerate(log):
        for number, (offset, value) in enumerate(control):
            if b'"reward":1.0' in value:
                control = [*control]
                control[number] = (offset, value.replace(b'"reward":1.0', b'"reward":2.0'))
                log[index] = (round_, control)
                return


def _record_gone(log: Logged) -> None:
    round_, control = log[3]
    log[3] = (round_, control[:-1])


def _record_early(log: Logged) -> None:
    first, second = log[2], log[3]
    log[2] = (first[0], [*first[1], second[1][0]])
    log[3] = (second[0], second[1][1:])


def _record_twice(log: Logged) -> None:
    round_, control = log[0]
    log[0] = (round_, [control[0], *control])


def _swapped(log: Logged) -> None:
    log[3], log[4] = log[4], log[3]


def _gone(log: Logged) -> None:
    del log[3]


def _doubled(log: Logged) -> None:
    log.insert(3, log[3])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_damaged(3, {"now_ns": 1}), "round 3: time decreases"),
        (_damaged(3, {"now_ns": 10**9}), "round 3: its chain"),
        (_damaged(3, {"incarnation": -5}), "round 3: incarnation -5 was over"),
        (_damaged(3, {"control_next": 0}), "round 3: position 0 decreases"),
        (_damaged(3, {"chain": "0" * 64}), "round 3: its chain"),
        (_damaged(3, {"state_digest": f"{0:064}"}), "round 3: the resulting state"),
        (_record_changed, "its chain"),
        (_record_gone, "round 3: its chain"),
        (_record_early, "round 2 does not fold offset"),
        (_record_twice, "round 0 does not fold offset 0"),
        (_swapped, "round 4 at the position of round 3"),
        (_gone, "round 4 at the position of round 3"),
        (_doubled, "round 3 at the position of round 4"),
    ],
)
def test_changed_log_is_named_with_its_round(damage: Callable[[Logged], None], why: str) -> None:
    log = list(whole_run().log)
    damage(log)
    with pytest.raises(InvariantBroken) as caught:
        fold(log)
    assert why in caught.value.message


def _first(log: Logged, kind: type[Any]) -> tuple[int, int, Any]:
    for index, (round_, _) in enumerate(log):
        for number, decision in enumerate(round_.decisions):
            if isinstance(decision, kind):
                return index, number, decision
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "change", "why"),
    [
        (Dispatch, {"seed": 1}, "not the next group"),
        (Dispatch, {"deadline": 99}, "not the next group"),
        (Schedule, {"samples": (ScheduledSample(sample=0, attempt=4),)}, "not the next attempt"),
        (Schedule, {"worker": "w7"}, "is not there"),
        (TakeBatch, {"step": 1}, "is not the next one"),
        (TakeBatch, {"groups": ()}, "without groups"),
    ],
)
def test_forged_decision_is_named_although_the_chain_was_forged_with_it(
    kind: type[Any], change: dict[str, Any], why: str
) -> None:
    log = list(whole_run().log)
    request, number, decision = _first(log, kind)
    if kind is Dispatch:
        spec = msgspec.structs.replace(decision.spec, **change)
        forged = msgspec.structs.replace(decision, spec=spec)
    else:
        forged = msgspec.structs.replace(decision, **change)
    round_, control = log[request]
    decisions = list(round_.decisions)
    decisions[number] = forged
    log[request] = (msgspec.structs.replace(round_, decisions=tuple(decisions)), control)
    with pytest.raises(InvariantBroken) as caught:
        fold(log)
    assert caught.value.message.startswith(f"round {round_.ordinal}: ")
    assert why in caught.value.message


def test_unreadable_control_records_are_in_the_chain_too() -> None:
    log: Logged = []
    for value in (b"not json", b"not json either"):
        round_ = Round(ordinal=0, incarnation=0, now_ns=0, control_next=1)
        chain = chain_of("0" * 64, fold_bytes(0, value), round_)
        log.append((msgspec.structs.replace(round_, chain=chain), [(0, value)]))
    assert fold([log[0]]).chain == log[0][0].chain
    with pytest.raises(InvariantBroken):
        fold([(log[0][0], log[1][1])])
