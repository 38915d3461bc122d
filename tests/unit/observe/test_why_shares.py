"""Tests that shares of `why` sum to at most 1."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.observe.waits import FAILED, role_waits
from dora_pipe.schemas.control import RequestFailed
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.metrics import TrainerStatus, Wait
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import SECOND_NS, CatalogueStage
from tests.support.stats_stage import COST

SECONDS = st.floats(0, 60, allow_nan=False)


def status(at_s: float, incarnation: int, since_s: float, name: str) -> TrainerStatus:
    wait = Wait(name=name, description=name, since_ns=int(since_s * 1e9), blocking=True)
    return TrainerStatus(
        at_ns=int(at_s * 1e9),
        cost=COST,
        waits=(wait,),
        incarnation=incarnation,
        step=0,
        phase="idle",
        cached_records=0,
        cached_bytes=0,
    )


@given(
    st.lists(st.tuples(SECONDS, SECONDS, st.sampled_from(("batch", "store", "start"))), max_size=9),
    st.lists(st.floats(0.01, 60), max_size=3),
    SECONDS,
)
def test_shares_of_a_role_add_up_to_that_of_the_whole_and_to_no_more_than_all(
    heard: Sequence[tuple[float, float, str]], told: Sequence[float], more_s: float
) -> None:
    results = [
        status(at_s, number % 2, min(at_s, since_s), name)
        for number, (at_s, since_s, name) in enumerate(sorted(heard))
    ]
    batch_waits = {
        ("sampling", f"groups of version {index}"): value for index, value in enumerate(told)
    }
    role = role_waits(
        "trainer",
        results,
        SECOND_NS,
        batch_waits=batch_waits,
        known_s=sum(told) + more_s,
        skip="batch",
    )
    (_, whole_s, full, _, _), *rows = role.rows()
    assert full <= 1 + 1e-9
    assert sum(share for _, _, share, _, _ in rows) == pytest.approx(full)
    assert sum(seconds for _, seconds, *_ in rows) == pytest.approx(whole_s)


@settings(max_examples=25)
@given(st.lists(st.sampled_from(("step", "stop", "stop in training")), max_size=8))
def test_steps_and_stops_add_up_to_the_time_of_the_run(story: Sequence[str]) -> None:
    stage = CatalogueStage()
    began_ns, worker, incarnation, step = stage.now_ns, stage.worker(), 0, 0
    stage.begins("orchestrator", 0)

    def stop() -> None:
        nonlocal incarnation
        incarnation += 1
        stage.now_ns += 30 * SECOND_NS
        stage.begins("orchestrator", incarnation)
        stage.begins("trainer", incarnation)

    for event in story:
        if event == "stop":
            stop()
            continue
        spec = stage.group(step, step)
        stage.place(spec, worker)
        stage.log(spec, worker)
        groups = stage.take(step, spec)
        if event == "stop in training":
            stop()
        stage.now_ns += SECOND_NS
        stage.fact(records.committed(step, groups))
        step += 1
    with closing(stage.catalogue) as tables:
        stops = tables.query("select since_ns, at_ns from marks where kind = 'resumed'")
        rows = tables.query("select step, seconds, waited_s, compute_s from steps")
        waits = dict(
            tables.query(
                "select step, sum(seconds) from waits where kind <> 'stopped' group by step"
            )
        )
    assert len(stops) == incarnation
    stopped_s = sum(end - begin for begin, end in stops) / 1e9
    assert stopped_s >= 30 * incarnation
    spent_s = sum(seconds for _, seconds, *_ in rows)
    assert spent_s + stopped_s <= (stage.now_ns - began_ns) / 1e9 + 1e-6
    for number, seconds, waited_s, _ in rows:
        assert waits.get(number, 0.0) == pytest.approx(waited_s)
        assert waited_s <= seconds < 30


@pytest.mark.parametrize(("again", "failed"), [((0.5, 0.0), 0), ((None, 0.0), 1), ((), 2)])
def test_a_trajectory_failed_if_its_last_attempt_did(
    again: tuple[float | None, ...], failed: int
) -> None:
    stage = CatalogueStage()
    incarnation = stage.worker()
    spec = stage.group(0)
    for attempt in (1, 2):
        stage.place(spec, incarnation, attempt=attempt)
        if attempt == 2 and again:
            outcomes = {0: {"error": "KeyError: 'x'"}} if None in again else {}
            stage.logged(spec, incarnation, again, attempt=attempt, text=outcomes)
            continue
        for sample in range(2):
            stage.fact(
                RequestFailed(
                    at_ns=0,
                    worker="w0",
                    incarnation=incarnation,
                    trajectory=trajectory_id(spec.group, sample),
                    attempt=attempt,
                    error="EngineError",
                    message="lost",
                    retryable=True,
                )
            )
    stage.end(spec, "failed")
    with closing(stage.catalogue) as tables:
        (row,) = tables.records(FAILED)
    assert (row["trajectories"], row["failed"]) == (2, failed)
