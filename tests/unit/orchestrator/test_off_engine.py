"""Tests of requests that need no engine slot."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.pure.records import Record
from dora_pipe.orchestrator.entities import OPEN_MAX, OPEN_TIMES, Worker
from dora_pipe.orchestrator.fold import apply_observation
from dora_pipe.schemas.metrics import WorkerStatus, decode_metrics
from dora_pipe.schemas.rounds import AnyDecision, OffEngine
from dora_pipe.schemas.wire import encode
from tests.support.orchestrator_stage import Stage
from tests.unit.orchestrator.test_machine import TOPICS, Bench

MANY: dict[str, Any] = {
    "run__steps": 50,
    "rollout__prompts_per_step": 2,
    "rollout__group_size": 1,
    "staleness__max_staleness": 40,
    "staleness__async_batches": 41.0,
}


def plan_after_off_engine(stage: Stage, name: str, requests: int) -> list[AnyDecision]:
    incarnation = stage.state.workers[name].incarnation
    apply_observation(
        stage.state, OffEngine(worker=name, incarnation=incarnation, requests=requests)
    )
    return stage.plan()


def test_however_many_need_no_slot_there_is_a_most_that_a_worker_has() -> None:
    stage = Stage(**MANY).begin()
    stage.worker("a", slots=4, prefetch=1)
    for _ in range(9):
        plan_after_off_engine(stage, "a", 1000)
    worker = stage.state.workers["a"]
    assert len(worker.requests) == OPEN_TIMES * 5 and not worker.open
    assert worker.free == 0, "slots that nobody may be given are not free"


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
        incarnation=1,
        slots=slots,
        prefetch=prefetch,
        requests={str(index) for index in range(many)},
        off_engine=min(off, many),
        leaving=min(leaving, many),
        arriving=arriving,
        served=-1,
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


def status(bench: Bench, incarnation: int, off_engine: int) -> Record:
    plain = bench.status("w0", incarnation)
    metrics = decode_metrics(plain.value)
    assert isinstance(metrics, WorkerStatus)
    metrics = msgspec.structs.replace(metrics, off_engine=off_engine)
    return Record(topic=TOPICS.metrics, partition=0, offset=9, key=b"", value=encode(metrics))


def off_engine_counts(result: list[Any]) -> list[int]:
    return [engine.requests for engine in result if isinstance(engine, OffEngine)]


def test_a_status_is_observed_when_it_says_another_number_and_once() -> None:
    bench = Bench(**MANY)
    incarnation = bench.serving(slots=4)
    assert off_engine_counts(bench.turn(status(bench, incarnation, 0))) == []
    assert off_engine_counts(
        bench.turn(status(bench, incarnation, 3), status(bench, incarnation, 2))
    ) == [2]
    rounds = len(bench.rounds)
    assert off_engine_counts(bench.turn(status(bench, incarnation, 2))) == []
    assert len(bench.rounds) == rounds, "what is known already makes no round"
    assert off_engine_counts(bench.turn(status(bench, incarnation, 0))) == [0]
    assert off_engine_counts(bench.turn(status(bench, incarnation - 1, 3))) == [], (
        "of another incarnation"
    )
