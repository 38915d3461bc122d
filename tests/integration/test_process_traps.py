"""Real processes with the torch engine: a worker that sleeps beyond its lease, one killed late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dora_pipe.audit.auditor import audit
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.schemas.control import (
    AnyControl,
    StepCommitted,
    TakenTrajectory,
    TrajectoriesLogged,
    WorkerJoined,
    decode_control,
)
from dora_pipe.schemas.rounds import Fence, Round, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import Unknown
from tests.support.kill_rounds.inject import Files
from tests.support.kill_rounds.order import Order
from tests.support.process_traps import (
    CHECKPOINT_TOKENS,
    KILLED,
    KILLED_AT,
    STOPPED,
    UNHARMED,
    directory_of,
    run_traps,
    stopped_incarnation,
)

LIMIT_S = 900.0
"""For three rounds on a busy machine; a round that hangs says so itself."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traps")
    run_traps(folder, limit_s=LIMIT_S)
    return folder


@contextmanager
def _log(order: Order, folder: Path) -> Iterator[tuple[Bus, Topics]]:
    path = directory_of(order, folder).path
    with closing(SqliteBus(path / "log.sqlite")) as bus:
        yield bus, Topics(path.name)


def _control(bus: Bus, topics: Topics) -> list[tuple[int, AnyControl | Unknown]]:
    records = records_of(bus, ends_of(bus, topics.control))
    return [(record.offset, decode_control(record.value)) for record in records]


def _trained(control: list[tuple[int, AnyControl | Unknown]]) -> list[TakenTrajectory]:
    commits = [fact for _, fact in control if isinstance(fact, StepCommitted)]
    return [
        trajectory for fact in commits for group in fact.groups for trajectory in group.trajectories
    ]


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


def test_worker_stopped_beyond_its_lease_is_fenced_and_what_it_logs_then_is_not_trained(
    folder: Path,
) -> None:
    with _log(STOPPED, folder) as (bus, topics):
        control = _control(bus, topics)
        joined = [
            (offset, fact)
            for offset, fact in control
            if isinstance(fact, WorkerJoined) and fact.worker == STOPPED.role
        ]
        incarnation = stopped_incarnation(folder)
        fence = _fence_of(bus, topics, STOPPED.role, incarnation)
        late = [
            fact
            for offset, record in control
            if isinstance(record, TrajectoriesLogged)
            and record.incarnation == incarnation
            and offset >= fence.control_next
            for fact in record.facts()
        ]
        report = audit(bus, topics, directory_of(STOPPED, folder).path / "policies")
    assert late, "it was stopped before it logged anything: the trap was not set"
    trained = {
        (record.incarnation, record.partition, record.offset) for record in _trained(control)
    }
    assert not {(record.incarnation, record.partition, record.offset) for record in late} & trained
    assert report.holds, report.violations
    assert report.record_statuses["fenced"] >= len(late)
    again = [fact for offset, fact in joined if offset > incarnation]
    assert again, "it did not join again"
    assert {fact.pid for _, fact in joined} == {again[0].pid}, "in the same process"


def _trajectories(order: Order, folder: Path) -> dict[str, Trajectory]:
    with _log(order, folder) as (bus, topics):
        expected = {(record.partition, record.offset) for record in _trained(_control(bus, topics))}
        records = records_of(bus, ends_of(bus, topics.trajectories))
        trajectories = [
            decode_trajectory(record.value)
            for record in records
            if (record.partition, record.offset) in expected
        ]
    return {trajectory.trajectory: trajectory for trajectory in trajectories}


def test_worker_killed_at_token_200_goes_on_from_its_progress_with_the_same_tokens(
    folder: Path,
) -> None:
    hit = Files(directory_of(KILLED, folder).path).read_hit()
    assert hit is not None and hit.role == KILLED.role
    killed, trajectories = _trajectories(KILLED, folder), _trajectories(UNHARMED, folder)
    assert killed.keys() == trajectories.keys()
    assert all(len(trajectory.meta.prefills) == 1 for trajectory in trajectories.values())
    went_on = [trajectory for trajectory in killed.values() if len(trajectory.meta.prefills) > 1]
    assert went_on
    reached = [
        trajectory.meta.prefills[-1] - trajectory.meta.prompt_tokens for trajectory in went_on
    ]
    assert max(reached) >= KILLED_AT - CHECKPOINT_TOKENS
    for trajectory in killed.values():
        assert trajectory.version == 0
        assert trajectory.token_ids == trajectories[trajectory.trajectory].token_ids
        ours = [value for value in trajectory.logprobs if value is not None]
        theirs = [
            value for value in trajectories[trajectory.trajectory].logprobs if value is not None
        ]
        assert ours == pytest.approx(theirs, abs=1e-4)
