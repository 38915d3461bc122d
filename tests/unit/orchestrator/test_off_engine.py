"""A request that is scored, or is at its environment, holds no place of a worker."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bus.port import Record
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.digest import digest_of
from dora_pipe.orchestrator.fold import apply_observation
from dora_pipe.orchestrator.snapshots import body_of, state_of
from dora_pipe.orchestrator.state import OPEN_MAX, OPEN_TIMES, Worker
from dora_pipe.schemas.metrics import WorkerStatus, decode_metrics
from dora_pipe.schemas.rounds import AnyDecision, Move, OffEngine
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage
from tests.support.singly import placed as placed_by
from tests.unit.orchestrator.test_machine import TOPICS, Bench

MANY: dict[str, Any] = {
    "run__steps": 50,
    "groups__per_step": 2,
    "groups__size": 1,
    "staleness__max_staleness": 40,
    "staleness__in_flight_batches": 41.0,
}


def observed(stage: Stage, name: str, requests: int) -> list[AnyDecision]:
    """So many requests of a worker need no slot; then everybody plans."""
    epoch = stage.state.workers[name].epoch
    apply_observation(stage.state, OffEngine(worker=name, epoch=epoch, requests=requests))
    return stage.plan()


def test_what_needs_no_slot_makes_room_for_others() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4, prefetch=2)
    assert len(stage.running("a")) == 6
    found = observed(stage, "a", 3)
    assert len(placed_by(found)) == 3
    worker = stage.state.workers["a"]
    assert (len(worker.requests), worker.load, worker.room) == (9, 6, 0)
    assert stage.plan() == []


def test_who_ends_did_not_need_a_slot_and_the_next_observation_is_exact() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4, prefetch=2)
    observed(stage, "a", 3)
    worker = stage.state.workers["a"]
    for name in stage.running("a")[:5]:
        stage.finish(name)
        assert worker.off_engine <= len(worker.requests)
    assert (worker.off_engine, len(worker.requests), worker.room) == (0, 4, 2)
    observed(stage, "a", 0)
    assert worker.room == 0


def test_requests_that_come_back_to_a_slot_leave_no_room_until_as_many_have_ended() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4)
    observed(stage, "a", 4)
    worker = stage.state.workers["a"]
    assert placed_by(observed(stage, "a", 0)) == []
    assert (len(worker.requests), worker.room, worker.free, worker.open) == (8, -4, 0, False)
    for name in stage.running("a")[:4]:
        stage.finish(name)
        assert placed_by(stage.plan()) == []
    stage.finish(stage.running("a")[0])
    assert len(placed_by(stage.plan())) == 1


def test_however_many_need_no_slot_there_is_a_most_that_a_worker_has() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4, prefetch=1)
    for _ in range(9):
        observed(stage, "a", 1000)
    worker = stage.state.workers["a"]
    assert len(worker.requests) == OPEN_TIMES * 5 and not worker.open
    assert worker.free == 0, "slots that nobody may be given are not free"


def test_more_is_open_but_never_more_than_the_bound_admits() -> None:
    stage = Stage(**{**MANY, "staleness__max_staleness": 1, "staleness__in_flight_batches": 2.0})
    stage.begin().worker("a", slots=2)
    observed(stage, "a", 2)
    observed(stage, "a", 4)
    assert len(stage.state.groups) == 4


def test_a_worker_that_is_lost_has_nothing_left_to_count() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4)
    observed(stage, "a", 4)
    stage.lose("a")
    stage.plan()
    epoch = stage.worker("a", slots=4)
    apply_observation(stage.state, OffEngine(worker="a", epoch=epoch - 2, requests=3))
    assert stage.state.workers["a"].off_engine == 0, "of an incarnation that is out"


def test_place_that_was_kept_for_a_request_stays_its_own() -> None:
    stage = Stage(**MANY).begin()
    stage.join("a", slots=2, moves=True)
    stage.join("b", slots=3, moves=True)
    stage.settle()
    observed(stage, "b", 3)
    to = stage.state.workers["b"]
    stage.finish(stage.running("b")[0])
    apply_observation(stage.state, OffEngine(worker="b", epoch=to.epoch, requests=len(to.requests)))
    name = stage.running("a")[0]
    request = stage.state.requests[name]
    move = Move(
        trajectory=name,
        attempt=request.attempt,
        worker="a",
        epoch=request.epoch,
        to="b",
        to_epoch=to.epoch,
        reason="a test",
    )
    apply_decision(stage.state, move)
    apply_observation(stage.state, OffEngine(worker="b", epoch=to.epoch, requests=0))
    stage.release(name)
    assert to.room < 0
    before = stage.copy()
    found = stage.plan()
    (kept, new) = placed_by(found)
    assert (kept.trajectory, kept.worker, new.worker) == (name, "b", "a")
    for one in found:
        apply_decision(before, one)
    assert digest_of(before) == digest_of(stage.state)


def test_a_placement_beyond_the_room_is_not_legal() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4)
    before = stage.copy()
    dispatch, place = observed(stage, "a", 1)
    apply_decision(before, dispatch)
    with pytest.raises(InvariantBroken, match="a is full"):
        apply_decision(before, place)


def test_the_digest_covers_requests_off_the_engine() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4)
    before = stage.state.digest()
    worker = stage.state.workers["a"]
    apply_observation(stage.state, OffEngine(worker="a", epoch=worker.epoch, requests=2))
    assert stage.state.digest() != before
    assert state_of(body_of(stage.state).joined()).workers["a"].off_engine == 2
    apply_observation(stage.state, OffEngine(worker="a", epoch=worker.epoch, requests=0))
    assert stage.state.digest() == before


@given(
    st.integers(1, 64) | st.sampled_from([700, 5000]),
    st.integers(0, 16),
    st.integers(0, 700),
    st.integers(0, 700),
    st.integers(0, 700),
    st.integers(0, 20),
)
def test_room_is_what_slots_and_the_most_leave(
    slots: int, prefetch: int, many: int, off: int, leaving: int, arriving: int
) -> None:
    worker = Worker(
        name="a",
        epoch=1,
        slots=slots,
        prefetch=prefetch,
        requests={str(one) for one in range(many)},
        off_engine=min(off, many),
        leaving=min(leaving, many),
        arriving=arriving,
        hosted=-1,
    )
    size, here = slots + prefetch, many + arriving
    most = max(2 * size, min(OPEN_TIMES * size, OPEN_MAX))
    assert worker.room == min(size + worker.off_engine, most) - here
    assert worker.open == (worker.room > 0)
    assert 0 <= worker.free <= slots
    assert arriving <= worker.load <= worker.present
    if not worker.off_engine and many + arriving <= size:
        assert worker.load == worker.present
        assert worker.free == max(0, slots - worker.load)


def status(bench: Bench, epoch: int, off_engine: int) -> Record:
    plain = bench.status("w0", epoch)
    found = decode_metrics(plain.value)
    assert isinstance(found, WorkerStatus)
    found = msgspec.structs.replace(found, off_engine=off_engine)
    return Record(topic=TOPICS.metrics, partition=0, offset=9, key=b"", value=encode(found))


def seen(found: list[Any]) -> list[int]:
    return [one.requests for one in found if isinstance(one, OffEngine)]


def test_a_status_is_observed_when_it_says_another_number_and_once() -> None:
    bench = Bench(**MANY)
    epoch = bench.serving(slots=4)
    assert seen(bench.turn(status(bench, epoch, 0))) == []
    assert seen(bench.turn(status(bench, epoch, 3), status(bench, epoch, 2))) == [2]
    rounds = len(bench.rounds)
    assert seen(bench.turn(status(bench, epoch, 2))) == []
    assert len(bench.rounds) == rounds, "what is known already makes no round"
    assert seen(bench.turn(status(bench, epoch, 0))) == [0]
    assert seen(bench.turn(status(bench, epoch - 1, 3))) == [], "of another incarnation"


def test_with_many_slots_a_small_difference_is_not_observed_but_the_last_one_is() -> None:
    bench = Bench(**MANY)
    epoch = bench.serving(slots=64)
    assert seen(bench.turn(status(bench, epoch, 40))) == [40]
    assert seen(bench.turn(status(bench, epoch, 43), status(bench, epoch, 37))) == []
    assert seen(bench.turn(status(bench, epoch, 36))) == [36]
    assert seen(bench.turn(status(bench, epoch, 10**6))) == [len(bench.machine.state.requests)]


def test_old_log_without_observations_plans_as_ever() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4, prefetch=2)
    joined = records.joined("b", slots=3, prefetch=1)
    stage.tell(joined)
    stage.settle()
    for worker in stage.state.workers.values():
        assert worker.room == 0 and len(worker.requests) == worker.slots + worker.prefetch
