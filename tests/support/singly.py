"""Conversion between records of several trajectories and single ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from dora_pipe.schemas.control import LoggedEntry, TrajectoriesLogged, TrajectoryLogged
from dora_pipe.schemas.rounds import AnyDecision, Schedule, ScheduledRequest, ScheduledSample

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
        incarnation=record.incarnation,
        version=record.version,
        digest=record.digest,
        trajectories=(entry,),
    )


def as_decision(decision: AnyDecision | ScheduledRequest) -> AnyDecision:
    if not isinstance(decision, ScheduledRequest):
        return decision
    sample = ScheduledSample(
        sample=decision.sample, attempt=decision.attempt, resume=decision.resume, kv=decision.kv
    )
    return Schedule(
        spec=decision.spec,
        worker=decision.worker,
        incarnation=decision.incarnation,
        samples=(sample,),
        reason=decision.reason or "test",
    )


def placed(decisions: Iterable[AnyDecision]) -> list[ScheduledRequest]:
    return [
        request
        for decision in decisions
        if isinstance(decision, Schedule)
        for request in decision.requests()
    ]


def singly(records: Iterable[T]) -> list[T | TrajectoryLogged]:
    results: list[T | TrajectoryLogged] = []
    for record in records:
        if isinstance(record, TrajectoriesLogged):
            results.extend(record.facts())
        else:
            results.append(record)
    return results
