"""Conversion between records of several trajectories and single ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from dora_pipe.schemas.control import LoggedEntry, TrajectoriesLogged, TrajectoryLogged
from dora_pipe.schemas.rounds import AnyDecision, Place, PlacedRequest, PlacedSibling

T = TypeVar("T")


def as_record(record: T | TrajectoryLogged) -> T | TrajectoriesLogged:
    if not isinstance(record, TrajectoryLogged):
        return record
    entry = LoggedEntry(
        trajectory=record.trajectory,
        attempt=record.attempt,
        partition=record.partition,
        offset=record.offset,
        sha256=record.sha256,
        bytes=record.bytes,
        tokens=record.tokens,
        finish=record.finish,
        reward=record.reward,
    )
    return TrajectoriesLogged(
        at_ns=record.at_ns,
        worker=record.worker,
        epoch=record.epoch,
        version=record.version,
        digest=record.digest,
        trajectories=(entry,),
    )


def as_decision(decision: AnyDecision | PlacedRequest) -> AnyDecision:
    if not isinstance(decision, PlacedRequest):
        return decision
    sibling = PlacedSibling(
        sibling=decision.sibling, attempt=decision.attempt, resume=decision.resume, kv=decision.kv
    )
    return Place(
        spec=decision.spec,
        worker=decision.worker,
        epoch=decision.epoch,
        siblings=(sibling,),
        reason=decision.reason or "test",
    )


def placed(decisions: Iterable[AnyDecision]) -> list[PlacedRequest]:
    return [request for one in decisions if isinstance(one, Place) for request in one.requests()]


def singly(records: Iterable[T]) -> list[T | TrajectoryLogged]:
    found: list[T | TrajectoryLogged] = []
    for one in records:
        if isinstance(one, TrajectoriesLogged):
            found.extend(one.facts())
        else:
            found.append(one)
    return found
