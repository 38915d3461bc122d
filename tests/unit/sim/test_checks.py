"""Negative controls of invariant checks: each change is found at its record.

Rounds are rechained, so that the change is found and not the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.pure.machine import Machine
from dora_pipe.core.pure.records import Record
from dora_pipe.schemas.control import (
    Command,
    Resume,
    RoleStarted,
    StepCommitted,
    WorkerLeft,
    WorkerReady,
    decode_control,
)
from dora_pipe.schemas.rounds import (
    GENESIS_CHAIN,
    Assign,
    Cancel,
    Dispatch,
    End,
    Fence,
    Migrate,
    Round,
    Schedule,
    StopRun,
    TakeBatch,
    chain_of,
    decode_round,
    fold_bytes,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.sim.invariant_monitor import InvariantMonitor
from dora_pipe.sim.parts import WorkerPlan
from dora_pipe.sim.role import Role
from dora_pipe.sim.world import SECOND_NS, World
from tests.support.cluster import make_config

put = msgspec.structs.replace

CONFIG = make_config(run__steps=4, timing__heartbeat_s=0.2)
PLANS = tuple(WorkerPlan(name=f"w{number}", slots=4, prefetch=2) for number in range(2))


@dataclass
class Recorder:
    records: list[Record]

    def appended(self, records: Sequence[Record], role: Role | None) -> None:
        self.records.extend(records)

    def wrap(self, role: Role, machine: Machine[Any, Any]) -> Machine[Any, Any]:
        return machine


def sound_run() -> list[Record]:
    recorder = Recorder([])
    with World(CONFIG, workers=PLANS, observer=recorder) as world:
        assert world.run(until_ns=600 * SECOND_NS)
        expected = (world.topics.control, world.topics.decisions)
    return [record for record in recorder.records if record.topic in expected]


def decoded(record: Record) -> Any:
    if record.topic.endswith("decisions"):
        return decode_round(record.value)
    return decode_control(record.value)


def changed(
    records: Iterable[Record], kind: type, change: Callable[[Any], Any], nth: int = 0
) -> list[Record]:
    results: list[Record] = []
    for record in records:
        value = decoded(record)
        if isinstance(value, Round):
            decisions: list[Any] = []
            for decision in value.decisions:
                if isinstance(decision, kind):
                    decision, nth = (change(decision) if nth == 0 else decision), nth - 1
                decisions += decision if isinstance(decision, list) else [decision]
            value = put(value, decisions=tuple(decisions))
        elif isinstance(value, kind):
            value, nth = (change(value) if nth == 0 else value), nth - 1
        results.append(replace(record, value=encode(value)))
    assert nth < 0, f"there are not so many of {kind.__name__}"
    return rechained(results)


def rechained(records: Sequence[Record]) -> list[Record]:
    control: list[Record] = []
    result, chain = [], GENESIS_CHAIN
    for record in records:
        value = decoded(record)
        if isinstance(value, Round):
            folded = [record for record in control if record.offset < value.control_next]
            control = [record for record in control if record.offset >= value.control_next]
            content = b"".join(fold_bytes(record.offset, record.value) for record in folded)
            chain = chain_of(chain, content, value)
            record = replace(record, value=encode(put(value, chain=chain)))
        else:
            control.append(record)
        result.append(record)
    return result


def finding(records: Iterable[Record]) -> str:
    monitor = InvariantMonitor(
        Topics(CONFIG.run.name), heartbeat_ns=SECOND_NS // 5, lease_ns=SECOND_NS
    )
    try:
        for record in records:
            monitor.appended([record], None)
        monitor.at_end()
    except InvariantBroken as error:
        return error.message
    return ""


@pytest.fixture(scope="module")
def stream() -> list[Record]:
    return sound_run()


def test_nothing_is_found_in_a_sound_run(stream: list[Record]) -> None:
    assert finding(stream) == ""


def _spec(**changes: Any) -> Callable[[Any], Any]:
    return lambda value: put(value, spec=put(value.spec, **changes))


def _first_sample(**changes: Any) -> Callable[[Any], Any]:
    return lambda value: put(value, samples=(put(value.samples[0], **changes), *value.samples[1:]))


def _other_record(batch: TakeBatch) -> TakeBatch:
    group = batch.groups[0]
    taken = put(group.trajectories[0], sha256="0" * 64)
    group = put(group, trajectories=(taken, *group.trajectories[1:]))
    return put(batch, groups=(group, *batch.groups[1:]))


def _moved_to_itself(schedule: Schedule) -> list[Any]:
    entry = schedule.requests()[0]
    return [
        schedule,
        Migrate(
            reason="t",
            trajectory=entry.trajectory,
            attempt=entry.attempt,
            worker=schedule.worker,
            incarnation=schedule.incarnation,
            to=schedule.worker,
            to_incarnation=schedule.incarnation,
        ),
    ]


def _crowded(schedule: Schedule) -> Schedule:
    return put(schedule, samples=schedule.samples * 7)


def _cancelled_elsewhere(schedule: Schedule) -> list[Any]:
    entry = schedule.requests()[0]
    cancel = Cancel(
        reason="t",
        trajectory=entry.trajectory,
        attempt=entry.attempt + 1,
        worker=schedule.worker,
        incarnation=schedule.incarnation,
    )
    return [schedule, cancel]


def _fenced(assign: Assign) -> list[Any]:
    return [assign, Fence(reason="t", worker=assign.worker, incarnation=assign.incarnation)]


CHANGES: list[tuple[str, type, Callable[[Any], Any], int]] = [
    ("outcome", End, lambda value: put(value, outcome="failed"), 0),
    ("C2", End, lambda value: [value, value], 0),
    ("decisions", Dispatch, lambda value: [value, value], 0),
    ("steps", Schedule, lambda value: [value, StopRun(reason="t")], 0),
    ("decisions", Dispatch, lambda value: _spec(deadline=value.spec.deadline + 1)(value), 3),
    ("decisions", Schedule, lambda value: put(value, incarnation=value.incarnation + 1), 0),
    ("decisions", Schedule, lambda value: [value, value], 0),
    ("placement", Schedule, _crowded, 0),
    ("placement", Schedule, _cancelled_elsewhere, 0),
    ("binding", TakeBatch, _other_record, 0),
    ("decisions", TakeBatch, lambda value: put(value, step=value.step + 1), 0),
    ("decisions", TakeBatch, lambda value: put(value, groups=value.groups[1:]), 0),
    ("batches", StepCommitted, lambda value: put(value, groups=value.groups[1:]), 0),
    ("batches", StepCommitted, lambda value: put(value, step=value.step + 1), 1),
    ("steps", StepCommitted, lambda value: put(value, digest_before="0" * 64), 1),
    ("assign", Assign, lambda value: [value, value], 0),
    ("lease", Assign, _fenced, 0),
    ("decisions", Schedule, _first_sample(attempt=2), 0),
    ("progress", Schedule, _first_sample(resume=Resume(tokens=4, partition=0, offset=1)), 0),
    ("C1", WorkerReady, lambda value: put(value, digest="0" * 64), 0),
    ("decisions", Assign, lambda value: put(value, digest="0" * 64), 0),
    ("decisions", Dispatch, lambda value: _spec(version=value.spec.version + 1)(value), 0),
    ("move", Schedule, _moved_to_itself, 0),
    ("incarnations", RoleStarted, lambda value: put(value, incarnation=value.incarnation + 1), 0),
    ("steps", StepCommitted, lambda value: put(value, incarnation=value.incarnation + 1), 0),
]


@pytest.mark.parametrize(("check", "kind", "change", "nth"), CHANGES)
def test_what_was_changed_is_found_by_its_checker(
    stream: list[Record], check: str, kind: type, change: Callable[[Any], Any], nth: int
) -> None:
    result = finding(changed(stream, kind, change, nth))
    assert result.partition(":")[0] == check, result


def test_round_that_was_changed_or_left_out_is_found(stream: list[Record]) -> None:
    rounds = [index for index, record in enumerate(stream) if isinstance(decoded(record), Round)]
    position = rounds[5]
    assert finding(stream[:position] + stream[position + 1 :]).startswith("rounds: ")
    later = msgspec.structs.replace(decoded(stream[position]), now_ns=10**19)
    forged = [*stream[:position], _with(stream[position], later), *stream[position + 1 :]]
    assert finding(forged).startswith("rounds: ")


def test_dispatch_while_paused_is_found(stream: list[Record]) -> None:
    first = [
        index for index, record in enumerate(stream) if isinstance(decoded(record), RoleStarted)
    ][-1]
    pause = _with(stream[first], Command(at_ns=1, user="t", verb="pause"), key=b"user")
    paused = [*stream[:first], pause, *stream[first + 1 :]]
    assert finding(changed(paused, Command, lambda value: value)).startswith("admission: ")


def test_word_of_an_incarnation_that_has_left_is_found(stream: list[Record]) -> None:
    remaining_stream = [
        index for index, record in enumerate(stream) if isinstance(decoded(record), WorkerLeft)
    ]
    removed = decoded(stream[remaining_stream[0]])
    ready = WorkerReady(
        at_ns=9,
        worker=removed.worker,
        incarnation=removed.incarnation,
        version=0,
        digest="0" * 64,
        load_ms=1.0,
    )
    late = [*stream, _with(stream[-1], ready)]
    assert finding(late).startswith("retired: ")
    assert finding([*stream, stream[remaining_stream[0]]]) == "", (
        "an append that is repeated is none"
    )


def test_group_without_an_outcome_is_found(stream: list[Record]) -> None:
    before = next(index for index, record in enumerate(stream) if b'"end"' in record.value)
    assert finding(stream[:before]).startswith("outcome: ")


def _with(record: Record, value: Any, **changes: Any) -> Record:
    return replace(record, value=encode(value), **changes)
