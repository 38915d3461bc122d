"""Real processes with the torch engine: a worker that sleeps beyond its lease."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dora_pipe.audit.auditor import audit
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.schemas.control import (
    StepCommitted,
    TrajectoriesLogged,
    WorkerJoined,
    decode_control,
)
from dora_pipe.schemas.rounds import Fence, Round, decode_round
from dora_pipe.schemas.topics import Topics
from tests.support.stopped_worker import STOPPED, run_round, stopped_incarnation

pytestmark = pytest.mark.slow

LIMIT_S = 900.0
"""For a round on a busy machine; a round that hangs reports it earlier."""


def _fence_of(bus: Bus, topics: Topics, worker: str, incarnation: int) -> Round:
    for record in records_of(bus, ends_of(bus, topics.decisions)):
        round_ = decode_round(record.value)
        for decision in round_.decisions:
            if isinstance(decision, Fence) and (decision.worker, decision.incarnation) == (
                worker,
                incarnation,
            ):
                return round_
    raise AssertionError("the worker was never fenced")


def test_worker_stopped_beyond_its_lease_is_fenced_and_its_later_records_are_not_trained(
    tmp_path: Path,
) -> None:
    directory = run_round(tmp_path, limit_s=LIMIT_S)
    incarnation = stopped_incarnation(directory)
    topics = Topics(directory.path.name)
    with closing(SqliteBus(directory.path / "log.sqlite")) as bus:
        records = records_of(bus, ends_of(bus, topics.control))
        control = [(record.offset, decode_control(record.value)) for record in records]
        fence = _fence_of(bus, topics, STOPPED.role, incarnation)
        report = audit(bus, topics, directory.path / "policies")
    joined = [
        (offset, fact)
        for offset, fact in control
        if isinstance(fact, WorkerJoined) and fact.worker == STOPPED.role
    ]
    late = {
        (fact.incarnation, fact.partition, fact.offset)
        for offset, record in control
        if isinstance(record, TrajectoriesLogged)
        and record.incarnation == incarnation
        and offset >= fence.control_next
        for fact in record.facts()
    }
    trained = {
        (trajectory.incarnation, trajectory.partition, trajectory.offset)
        for _, fact in control
        if isinstance(fact, StepCommitted)
        for group in fact.groups
        for trajectory in group.trajectories
    }
    assert late, "it was stopped before it logged anything"
    assert not late & trained
    assert report.holds, report.violations
    assert report.record_statuses["fenced"] >= len(late)
    again = [fact for offset, fact in joined if offset > incarnation]
    assert again, "it did not join again"
    assert {fact.pid for _, fact in joined} == {again[0].pid}, "in the same process"
